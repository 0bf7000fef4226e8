//! Link options of the provider's shared object.
//!
//! `-z nodelete`: the library stays mapped after `dlclose`, because thread-exit destructors of the
//! Rust runtime may still point into it. `fi_prov_ini` re-initialises everything on each load.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libudrv-fi.so");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,now");
}
