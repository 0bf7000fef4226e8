//! A libfabric that is loaded at run time: what it is, where it looks for providers, and what udrv offers through it.
#![allow(unsafe_code)] // foreign functions

use libfabric_sys::{
    FI_CONTEXT, FI_CONTEXT2, FI_EP_RDM, FI_ORDER_SAS, FI_PARAM_STRING, FI_TAGGED, FI_THREAD_DOMAIN,
    fi_fabric_attr, fi_info, fi_major, fi_minor, fi_param, fi_param_type, fi_provider, fi_version,
    fid_fabric, fid_nic,
};
use libloading::Library;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::PathBuf;
use std::ptr::{null, null_mut};

type VersionFn = unsafe extern "C" fn() -> u32;
type GetparamsFn = unsafe extern "C" fn(*mut *mut fi_param, *mut c_int) -> c_int;
type FreeparamsFn = unsafe extern "C" fn(*mut fi_param);
type ParamDefineFn = unsafe extern "C" fn(
    *const fi_provider,
    *const c_char,
    fi_param_type,
    *const c_char,
    ...
) -> c_int;
type ParamGetFn = unsafe extern "C" fn(*const fi_provider, *const c_char, *mut c_void) -> c_int;
type GetinfoFn = unsafe extern "C" fn(
    u32,
    *const c_char,
    *const c_char,
    u64,
    *const fi_info,
    *mut *mut fi_info,
) -> c_int;
type DupinfoFn = unsafe extern "C" fn(*const fi_info) -> *mut fi_info;
type FreeinfoFn = unsafe extern "C" fn(*mut fi_info);
type StrerrorFn = unsafe extern "C" fn(c_int) -> *const c_char;
pub(crate) type FabricFn =
    unsafe extern "C" fn(*mut fi_fabric_attr, *mut *mut fid_fabric, *mut c_void) -> c_int;

/// The API whose structures this command knows: that of the oldest libfabric that loads udrv.
const API: u32 = fi_version(1, 17);

/// A loaded libfabric.
pub(crate) struct Libfabric {
    library: Library,
}

/// A variable, as libfabric lists it.
pub(crate) struct Parameter {
    pub(crate) name: String,
    pub(crate) help: String,
    pub(crate) value: Option<String>,
}

/// An interface or device that a provider offers.
pub(crate) struct Offer {
    pub(crate) provider: String,
    pub(crate) domain: String,
    pub(crate) address: Option<String>,
    pub(crate) device: Option<String>,
    /// Bits per second.
    pub(crate) speed: Option<usize>,
    pub(crate) mtu: Option<usize>,
}

impl Libfabric {
    /// Loads the file, or what the loader finds by a name without slashes.
    pub(crate) fn open(file: &str) -> Result<Self, String> {
        // SAFETY: libfabric's initialisation may be run in any process.
        let library = unsafe { Library::new(file) }.map_err(|error| error.to_string())?;
        let this = Self { library };
        this.symbol::<VersionFn>("fi_version")?;
        Ok(this)
    }

    /// The function `name`. The caller vouches, by calling it, that `F` is its type.
    pub(crate) fn symbol<F: Copy>(&self, name: &str) -> Result<F, String> {
        // SAFETY: nothing is called here; the types above are those of rdma/fabric.h.
        let found = unsafe { self.library.get::<F>(name.as_bytes()) };
        found.map(|symbol| *symbol).map_err(|error| error.to_string())
    }

    /// Its release, as major and minor.
    pub(crate) fn version(&self) -> Result<(u32, u32), String> {
        // SAFETY: takes nothing, and always succeeds.
        let version = unsafe { self.symbol::<VersionFn>("fi_version")?() };
        Ok((fi_major(version), fi_minor(version)))
    }

    /// The file it was loaded from.
    pub(crate) fn path(&self) -> Option<PathBuf> {
        let at = self.symbol::<*const c_void>("fi_version").ok()?;
        // SAFETY: zeroes are a valid value of this structure.
        let mut found: libc::Dl_info = unsafe { std::mem::zeroed() };
        // SAFETY: an address of code, and room for the answer.
        if unsafe { libc::dladdr(at, &mut found) } == 0 {
            return None;
        }
        // SAFETY: a C string that lives as long as the library.
        PathBuf::from(unsafe { text(found.dli_fname) }?).canonicalize().ok()
    }

    /// All variables that it and its providers read.
    pub(crate) fn parameters(&self) -> Result<Vec<Parameter>, String> {
        let get = self.symbol::<GetparamsFn>("fi_getparams")?;
        let free = self.symbol::<FreeparamsFn>("fi_freeparams")?;
        let (mut list, mut count) = (null_mut(), 0);
        // SAFETY: room for both answers.
        self.check("fi_getparams", unsafe { get(&mut list, &mut count) })?;
        let found = (0..usize::try_from(count).unwrap_or(0)).filter_map(|at| {
            // SAFETY: the list has that many entries of C strings.
            unsafe {
                let entry = &*list.add(at);
                let (name, help) = (text(entry.name)?, text(entry.help_string)?);
                Some(Parameter { name, help, value: text(entry.value) })
            }
        });
        let found = found.collect();
        // SAFETY: the list that it made, not used again.
        unsafe { free(list) };
        Ok(found)
    }

    /// The text of the variable `FI_` and `name`, of the environment or of libfabric.conf, which libfabric reads from
    /// release 1.18 on: fi_getparams tells of the environment alone. Libfabric writes it in its own log at the level info.
    pub(crate) fn value(&self, name: &str) -> Option<String> {
        let define = self.symbol::<ParamDefineFn>("fi_param_define").ok()?;
        let get = self.symbol::<ParamGetFn>("fi_param_get").ok()?;
        let name = CString::new(name).ok()?;
        let mut found: *const c_char = null();
        // SAFETY: C strings. A variable of libfabric's own, of this type, is a pointer to a C string that stays.
        unsafe {
            let core = null();
            let rc = define(core, name.as_ptr(), FI_PARAM_STRING, c"%s".as_ptr(), c"-".as_ptr());
            (rc == 0 && get(core, name.as_ptr(), (&raw mut found).cast()) == 0)
                .then(|| text(found))?
        }
    }

    /// The folder in which it looks for providers unless FI_PROVIDER_PATH is set: what it says about that variable.
    pub(crate) fn provider_folder(&self) -> Option<String> {
        let all = self.parameters().ok()?;
        let help = &all.iter().find(|parameter| parameter.name == "FI_PROVIDER_PATH")?.help;
        let (_, folder) = help.rsplit_once("(default: ")?;
        Some(folder.trim_end_matches(')').to_owned()).filter(|folder| folder.starts_with('/'))
    }

    /// What `provider` offers for tagged messages, as MPIs ask.
    pub(crate) fn offers(&self, provider: &str) -> Result<Vec<Offer>, String> {
        let list = self.ask(provider)?;
        let (mut found, mut at) = (Vec::new(), list.first);
        while !at.is_null() {
            // SAFETY: an entry of the list, whose members are null or complete.
            unsafe {
                found.push(offer(&*at));
                at = (*at).next;
            }
        }
        Ok(found)
    }

    /// fi_getinfo for reliable endpoints with tagged messages.
    pub(crate) fn ask(&self, provider: &str) -> Result<Infos, String> {
        let get = self.symbol::<GetinfoFn>("fi_getinfo")?;
        let free = self.symbol::<FreeinfoFn>("fi_freeinfo")?;
        let name = CString::new(provider).map_err(|error| error.to_string())?;
        // SAFETY: fi_dupinfo of nothing allocates an empty structure with all its parts (fi_allocinfo), which
        // fi_freeinfo frees with the name: strdup's, as it expects.
        unsafe {
            let hints = self.symbol::<DupinfoFn>("fi_dupinfo")?(null());
            if hints.is_null() {
                return Err("no memory".to_owned());
            }
            let hints = Infos { first: hints, free };
            let h = &mut *hints.first;
            (h.caps, h.mode) = (FI_TAGGED, FI_CONTEXT | FI_CONTEXT2);
            (*h.ep_attr).type_ = FI_EP_RDM;
            (*h.domain_attr).threading = FI_THREAD_DOMAIN;
            (*h.domain_attr).mr_mode = 0;
            (*h.tx_attr).msg_order = FI_ORDER_SAS;
            (*h.rx_attr).msg_order = FI_ORDER_SAS;
            (*h.fabric_attr).prov_name = libc::strdup(name.as_ptr());
            let mut first = null_mut();
            let rc = get(API, null(), null(), 0, hints.first, &mut first);
            self.check("fi_getinfo", rc)?;
            Ok(Infos { first, free })
        }
    }

    /// An error of libfabric, in its words.
    pub(crate) fn check(&self, what: &str, rc: impl Into<i64>) -> Result<(), String> {
        let rc = rc.into();
        if rc == 0 {
            return Ok(());
        }
        let name = self.symbol::<StrerrorFn>("fi_strerror").ok().and_then(|strerror| {
            // SAFETY: returns a constant C string for any number.
            unsafe { text(strerror(c_int::try_from(-rc).unwrap_or(0))) }
        });
        Err(format!("{what}: {} ({rc})", name.unwrap_or_default()))
    }
}

/// A list that fi_getinfo made.
pub(crate) struct Infos {
    pub(crate) first: *mut fi_info,
    free: FreeinfoFn,
}

impl Drop for Infos {
    fn drop(&mut self) {
        // SAFETY: a list of libfabric's that nobody else frees.
        unsafe { (self.free)(self.first) };
    }
}

/// # Safety
/// Null, or a C string.
unsafe fn text(from: *const c_char) -> Option<String> {
    // SAFETY: the caller vouches.
    (!from.is_null()).then(|| unsafe { CStr::from_ptr(from) }.to_string_lossy().into_owned())
}

/// # Safety
/// As fi_getinfo returns it.
unsafe fn offer(info: &fi_info) -> Offer {
    // SAFETY: members are null, or complete.
    unsafe {
        let nic = device(info.nic);
        Offer {
            provider: text((*info.fabric_attr).prov_name).unwrap_or_default(),
            domain: text((*info.domain_attr).name).unwrap_or_default(),
            address: address(info.src_addr.cast(), info.src_addrlen),
            device: nic.as_ref().map(|nic| nic.0.clone()),
            speed: nic.as_ref().map(|nic| nic.1),
            mtu: nic.map(|nic| nic.2),
        }
    }
}

/// # Safety
/// Null, or a complete structure.
unsafe fn device(nic: *const fid_nic) -> Option<(String, usize, usize)> {
    // SAFETY: members are null, or complete.
    unsafe {
        let nic = nic.as_ref()?;
        let link = nic.link_attr.as_ref()?;
        Some((text(nic.device_attr.as_ref()?.name)?, link.speed, link.mtu))
    }
}

/// The IP address in a socket address.
///
/// # Safety
/// Null, or `len` bytes.
unsafe fn address(at: *const u8, len: usize) -> Option<String> {
    if at.is_null() {
        return None;
    }
    // SAFETY: the caller vouches.
    let bytes = unsafe { std::slice::from_raw_parts(at, len) };
    let family = u16::from_ne_bytes(bytes.get(..2)?.try_into().ok()?);
    if i32::from(family) == libc::AF_INET {
        let ip: [u8; 4] = bytes.get(4..8)?.try_into().ok()?;
        return Some(std::net::Ipv4Addr::from(ip).to_string());
    }
    let ip: [u8; 16] = bytes.get(8..24)?.try_into().ok()?;
    Some(std::net::Ipv6Addr::from(ip).to_string())
}
