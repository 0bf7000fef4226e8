//! Values that an administrator has set for all programs, in libfabric's file `libfabric.conf` (libfabric 1.18 and
//! later). Libfabric reads them when udrv is loaded; the environment of the process counts more, unless the file says
//! `FI_PREFER_SYSCONFIG=1`.

use std::sync::{PoisonError, RwLock};

/// The values of a file.
#[derive(Debug)]
pub(crate) struct System {
    /// Names with their prefix, and texts.
    values: Vec<(String, String)>,
    /// They count more than the environment.
    is_first: bool,
}

static SYSTEM: RwLock<System> = RwLock::new(System { values: Vec::new(), is_first: false });

impl System {
    pub(crate) fn new(values: Vec<(String, String)>, is_first: bool) -> Self {
        Self { values, is_first }
    }

    /// All further readings of the configuration see these values.
    pub(crate) fn install(self) {
        *SYSTEM.write().unwrap_or_else(PoisonError::into_inner) = self;
    }

    fn value(&self, name: &str, own: Option<String>) -> Option<String> {
        let theirs = || self.values.iter().find(|(known, _)| known == name).map(|(_, v)| v.clone());
        if self.is_first { theirs().or(own) } else { own.or_else(theirs) }
    }
}

/// The text of a variable, of the environment or of the file.
pub(super) fn text(name: &str) -> Option<String> {
    // A value that is not UTF-8 must not count as absent: that would leave a job without its key.
    let own = std::env::var_os(name).map(|text| text.to_string_lossy().into_owned());
    SYSTEM.read().unwrap_or_else(PoisonError::into_inner).value(name, own)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_counts_more_unless_the_file_is_first() {
        let values = vec![("FI_UDRV_NET".to_owned(), "0".to_owned())];
        let own = || Some("1".to_owned());
        let system = System::new(values.clone(), false);
        assert_eq!(system.value("FI_UDRV_NET", own()).as_deref(), Some("1"));
        assert_eq!(system.value("FI_UDRV_NET", None).as_deref(), Some("0"));
        assert_eq!(system.value("FI_UDRV_SHM", None), None);
        let system = System::new(values, true);
        assert_eq!(system.value("FI_UDRV_NET", own()).as_deref(), Some("0"));
        assert_eq!(system.value("FI_UDRV_SHM", own()).as_deref(), Some("1"));
    }
}
