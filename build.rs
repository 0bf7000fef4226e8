//! Link options of the provider's shared object.
//!
//! `-z nodelete`: the library stays mapped after `dlclose`, because thread-exit destructors of the
//! Rust runtime may still point into it. `fi_prov_ini` re-initialises everything on each load.
//!
//! `UDRV_BUILD_ID`, hexadecimal: the build ID, by which debuggers find debug information. `scripts/package` gives one that
//! depends on the sources, and not on folders of the machine.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libudrv-fi.so");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,now");
    println!("cargo:rerun-if-env-changed=UDRV_BUILD_ID");
    if let Ok(id) = std::env::var("UDRV_BUILD_ID") {
        println!("cargo:rustc-cdylib-link-arg=-Wl,--build-id=0x{id}");
    }
}
