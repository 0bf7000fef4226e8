// SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only

//! Writes the bindings of `libfabric-sys` from libfabric's public headers.
//!
//! Usage: `libfabric-sys-generate [OUTPUT]`, by default `../src/bindings.rs`.
//! The headers are taken from `$LIBFABRIC_INCLUDE`, by default `/usr/include`.

use bindgen::callbacks::{EnumVariantValue, IntKind, ParseCallbacks};
use std::{
    env,
    error::Error,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Prefix of the enumerators in `wrapper.h` that stand for macros with a cast.
const CAST: &str = "CAST_";

/// Chooses the Rust type of every macro, and restores the names of cast macros.
#[derive(Debug)]
struct Names;

impl ParseCallbacks for Names {
    fn int_macro(&self, name: &str, value: i64) -> Option<IntKind> {
        Some(macro_kind(name, value))
    }

    fn enum_variant_name(
        &self,
        _enum_name: Option<&str>,
        variant: &str,
        _value: EnumVariantValue,
    ) -> Option<String> {
        variant.strip_prefix(CAST).map(str::to_owned)
    }
}

fn macro_kind(name: &str, value: i64) -> IntKind {
    // Flags whose names start like error numbers.
    let flag = ["FI_EVENT", "FI_EXACT_DIRECTED_RECV"].contains(&name);
    let errno =
        name == "FI_SUCCESS" || name.starts_with("FI_E") && !flag && (0..4096).contains(&value);
    // `mr_mode` is an int. The MR modes end at bit 11, larger values are flags.
    let mr_mode = name.starts_with("FI_MR_") && value < 1 << 16;
    if errno || mr_mode || name.starts_with("FI_PROV_SPECIFIC_") {
        IntKind::I32
    } else if name.ends_with("_VERSION") || name == "FI_PROV_SPECIFIC" {
        IntKind::U32
    } else {
        IntKind::U64
    }
}

/// The type of an enumerator of an unnamed enum (or of one whose name says
/// nothing): the type of the structure member or argument that it is for.
fn constant_type(name: &str, enum_name: &str, value: &str) -> Option<&'static str> {
    if enum_name == "cast_macros" {
        return Some(match name {
            "FI_SHARED_CONTEXT" => "usize",
            "FI_COLLECTIVE_OFFSET" => "u32",
            _ => "u64",
        });
    }
    if enum_name == "fi_mr_mode" {
        return Some("i32");
    }
    if !enum_name.starts_with("_bindgen_ty_") {
        return None;
    }
    let prefixed = |prefixes: &[&str]| prefixes.iter().any(|p| name.starts_with(p));
    Some(
        if prefixed(&["FI_CLASS_"])
            || ["FI_PATH_MAX", "FI_NAME_MAX", "FI_VERSION_MAX"].contains(&name)
        {
            "usize"
        } else if prefixed(&["FI_PROTO_", "FI_ADDR_", "FI_SOCKADDR", "FI_FORMAT_", "FI_TC_"])
            || ["FI_NOTIFY", "FI_CONNREQ", "FI_CONNECTED", "FI_SHUTDOWN"].contains(&name)
            || ["FI_MR_COMPLETE", "FI_AV_COMPLETE", "FI_JOIN_COMPLETE"].contains(&name)
        {
            "u32"
        } else if value.parse::<i32>().is_ok() {
            "i32"
        } else {
            "u32"
        },
    )
}

/// Retypes the constants and drops the type aliases that are no longer used.
fn retype(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for line in text.lines() {
        let alias = line.strip_prefix("pub type ").and_then(|l| l.split_once(" = "));
        if alias.is_some_and(|(n, _)| n == "cast_macros" || n.starts_with("_bindgen_ty_")) {
            continue;
        }
        let changed = line.strip_prefix("pub const ").and_then(|l| {
            let (name, rest) = l.split_once(": ")?;
            let (ty, value) = rest.strip_suffix(';')?.split_once(" = ")?;
            let ty = constant_type(name, ty, value)?;
            Some(format!("pub const {name}: {ty} = {value};"))
        });
        out.push_str(changed.as_deref().unwrap_or(line));
        out.push('\n');
    }
    out
}

/// The version, such as `1.17.0`, from the `FI_*_VERSION` macros of `rdma/fabric.h`.
fn header_version(include: &Path) -> Result<String, Box<dyn Error>> {
    let path = include.join("rdma/fabric.h");
    let text = fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    let part = |name: &str| {
        text.lines()
            .find_map(|line| {
                let mut words = line.split_whitespace();
                (words.next()? == "#define" && words.next()? == name).then(|| words.next())?
            })
            .ok_or_else(|| format!("{}: no {name}", path.display()))
    };
    Ok(format!(
        "{}.{}.{}",
        part("FI_MAJOR_VERSION")?,
        part("FI_MINOR_VERSION")?,
        part("FI_REVISION_VERSION")?
    ))
}

fn main() -> Result<(), Box<dyn Error>> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let include = env::var_os("LIBFABRIC_INCLUDE").unwrap_or_else(|| "/usr/include".into());
    let include = PathBuf::from(include);
    let output = env::args_os().nth(1).map(PathBuf::from);
    let output = output.unwrap_or_else(|| here.join("../src/bindings.rs"));
    let version = header_version(&include)?;

    let bindings = bindgen::Builder::default()
        .header(here.join("wrapper.h").to_str().ok_or("path is not UTF-8")?)
        .clang_arg(format!("-I{}", include.display()))
        .allowlist_file(r".*/rdma/(fabric|fi_[a-z]+)\.h")
        .allowlist_file(r".*/rdma/providers/fi_[a-z]+\.h")
        .allowlist_type("cast_macros")
        .blocklist_function(".*")
        .blocklist_type("iovec|pollfd|(__)?pthread_.*|__atomic_.*")
        .blocklist_item("_FI_.*|FI_LIB_.*|FI_COLLECTIVE_OFFSET|FI_SHARED_CONTEXT")
        .raw_line("use libc::{iovec, pollfd, pthread_cond_t, pthread_mutex_t};")
        .default_enum_style(bindgen::EnumVariation::Consts)
        .prepend_enum_name(false)
        .generate_comments(false)
        .generate_cstr(true)
        .wrap_unsafe_ops(true)
        .use_core()
        .ctypes_prefix("core::ffi")
        .layout_tests(true)
        .merge_extern_blocks(true)
        .rust_target(bindgen::RustTarget::stable(85, 0).map_err(|e| e.to_string())?)
        .rust_edition(bindgen::RustEdition::Edition2024)
        .disable_header_comment()
        .formatter(bindgen::Formatter::None)
        .parse_callbacks(Box::new(Names))
        .generate()?
        .to_string();

    // `retype` reads one item per line, so rustfmt runs first, and again last.
    let header = format!(
        "// SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only\n\
         //\n\
         // Generated by bindgen 0.72.1 from the public headers of libfabric {version}\n\
         // (Debian 12: package libfabric-dev). Do not edit: run `generate/run` in this\n\
         // crate to write this file again, `generate/check` to see whether it is current.\n\n"
    );
    fs::write(&output, bindings)?;
    rustfmt(&output)?;
    let text = retype(&fs::read_to_string(&output)?);
    fs::write(&output, header + &text)?;
    rustfmt(&output)
}

fn rustfmt(path: &Path) -> Result<(), Box<dyn Error>> {
    let status = Command::new("rustfmt")
        .args(["--edition", "2024", "--config-path", env!("CARGO_MANIFEST_DIR")])
        .arg(path)
        .status()
        .map_err(|e| format!("rustfmt: {e}"))?;
    if status.success() { Ok(()) } else { Err(format!("rustfmt: {status}").into()) }
}
