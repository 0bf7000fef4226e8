//! Whether the rv module is used (FI_UDRV_RV), and opening it for an endpoint.

use super::Rv;
use super::config::RvPolicy;
use crate::sys::Errno;
use crate::sys::rv::{Found, Here};
use crate::sys::verbs::copies_at_fork;
use crate::telemetry::log;
use crate::transport::net::bulk::Bulk;
use crate::transport::net::network::Network;

/// The bulk path of an endpoint at `here`, whose port takes packets of `mtu` bytes; `home` tells whether the endpoint
/// is still there. `None`: not wanted, or does not work and is not required. Errors: ENODEV, if it is required; EMFILE,
/// ENFILE.
pub(in crate::transport::net) fn open(
    policy: RvPolicy,
    here: &Here,
    (network, mtu): (Network, u16),
    home: Box<dyn Fn() -> bool + Send>,
) -> Result<Option<Box<dyn Bulk>>, Errno> {
    if policy == RvPolicy::Off {
        return Ok(None);
    }
    // Otherwise a fork separates the application's pages from those that the module has pinned: unlike libibverbs it keeps
    // none from children.
    let copied = match copies_at_fork() {
        true => Ok(()),
        false => {
            Err("the kernel does not copy pinned pages at a fork (Linux 5.12 does)".to_owned())
        }
    };
    let attached = copied.and_then(|()| {
        let found = Found::open().map_err(|refusal| refusal.to_string())?;
        found.attach(here).map_err(|refusal| refusal.to_string())
    });
    match attached {
        Ok((module, ring)) => {
            log::info(format_args!(
                "the rv module, ABI 1.{}, serves {}:{}: this is process {} of the job there, its events lie as {:?}",
                module.minor(),
                here.device,
                here.port,
                module.index(),
                ring.layout()
            ));
            let rv = Rv::new((module, ring), network, mtu, home)?;
            Ok(Some(Box::new(rv)))
        }
        Err(why) => missing(policy, &why).map(|()| None),
    }
}

/// Checks that a required module exists, without attaching to it. Errors: ENODEV.
pub(in crate::transport::net) fn check(policy: RvPolicy) -> Result<(), Errno> {
    if policy != RvPolicy::Require {
        return Ok(());
    }
    Found::open().map(|_| ()).or_else(|refusal| missing(policy, &refusal.to_string()))
}

/// The module is missing. Errors: ENODEV, if it is required.
fn missing(policy: RvPolicy, why: &str) -> Result<(), Errno> {
    if policy == RvPolicy::Require {
        log::error(format_args!("FI_UDRV_RV=require cannot be met: {why}"));
        return Err(Errno(libc::ENODEV));
    }
    log::info(format_args!("the rv module is not used: {why}"));
    Ok(())
}
