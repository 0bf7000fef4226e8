//! The list of transports.

#[cfg(test)]
#[path = "doubles.rs"]
pub(super) mod doubles;

/// Makes the list. Its order is the order in which the router tries transports for a peer: by increasing cost.
///
/// `on_lane!(lanes, lane, t => a, b)` is `a` with the transport `t` of that lane, or `b` if that transport is not open;
/// `each_lane!(lanes, (lane, t) => a)` does `a` with each open transport; `..._mut!` are the same for `&mut`.
/// An entry with a path (`name: Type = "path"`) is a transport outside this folder; one may have a condition.
macro_rules! transports {
    (($d:tt) $($(#[$when:meta])? $name:ident: $kind:ty $(= $path:literal)?),* $(,)?) => {
        $($(#[path = $path] mod $name;)?)*

        /// The open transports of an endpoint.
        #[derive(Debug)]
        pub(super) struct Lanes {
            $($(#[$when])? pub(super) $name: Option<Box<$kind>>,)*
        }

        impl Lanes {
            /// Opens all enabled transports. Errors: those of [`crate::transport::Transport::open`].
            pub(super) fn open(opening: &mut crate::transport::Opening<'_>) -> Result<Self, crate::sys::Errno> {
                Ok(Self {
                    $(
                        $(#[$when])?
                        $name: <$kind as crate::transport::Transport>::open(opening)?.map(Box::new),
                    )*
                })
            }
        }

        /// [`crate::transport::Transport::are_left_settled`] of all transports.
        pub(super) fn are_left_settled() -> bool {
            let mut settled = true;
            $(
                $(#[$when])?
                (settled &= <$kind as crate::transport::Transport>::are_left_settled());
            )*
            settled
        }

        /// [`crate::transport::Transport::with_device`] of the first transport that has the device.
        pub(crate) fn with_device(
            config: &crate::config::Config,
            name: &str,
        ) -> Option<Result<crate::config::Config, &'static str>> {
            let mut found = None;
            $(
                $(#[$when])?
                (found = found.or_else(|| <$kind as crate::transport::Transport>::with_device(config, name)));
            )*
            found
        }

        /// [`crate::transport::Transport::addresses_of`] of all transports.
        pub(crate) fn addresses_of(name: &str) -> Vec<std::net::IpAddr> {
            let mut all = Vec::new();
            $($(#[$when])? all.extend(<$kind as crate::transport::Transport>::addresses_of(name));)*
            all
        }

        /// [`crate::transport::Transport::device_at`] of the first transport that has one.
        pub(crate) fn device_at(
            config: &crate::config::Config,
            ip: std::net::IpAddr,
        ) -> Result<Option<crate::sys::net::Nic>, &'static str> {
            $($(#[$when])? if let Some(nic) = <$kind as crate::transport::Transport>::device_at(config, ip)? {
                return Ok(Some(nic));
            })*
            Ok(None)
        }

        /// A transport of the list.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[allow(non_camel_case_types)]
        pub(super) enum Lane {
            $($(#[$when])? $name,)*
        }

        /// The number of transports.
        pub(super) const COUNT: usize = Lane::ALL.len();

        impl Lane {
            pub(super) const ALL: &'static [Self] = &[$($(#[$when])? Self::$name),*];

            /// The transport that makes remote keys of this kind: the first in the list.
            #[inline]
            pub(super) fn of_key(kind: u8) -> Option<Self> {
                $($(#[$when])? if <$kind as crate::transport::Transport>::KEYS.contains(&kind) {
                    return Some(Self::$name);
                })*
                None
            }

            /// The kinds of remote keys of all transports.
            #[cfg(test)]
            pub(super) fn keys() -> Vec<u8> {
                [$(<$kind as crate::transport::Transport>::KEYS),*].concat()
            }
        }

        macro_rules! on_lane {
            ($d lanes:expr, $d lane:expr, $d t:ident => $d body:expr, $d none:expr) => {
                match $d lane {
                    $($(#[$when])? Lane::$name => match $d lanes.$name.as_deref() { Some($d t) => $d body, None => $d none },)*
                }
            };
        }

        macro_rules! on_lane_mut {
            ($d lanes:expr, $d lane:expr, $d t:ident => $d body:expr, $d none:expr) => {
                match $d lane {
                    $($(#[$when])? Lane::$name => match $d lanes.$name.as_deref_mut() { Some($d t) => $d body, None => $d none },)*
                }
            };
        }

        macro_rules! each_lane {
            ($d lanes:expr, ($d lane:ident, $d t:ident) => $d body:expr) => {
                $($(#[$when])? if let Some($d t) = $d lanes.$name.as_deref() {
                    #[allow(unused_variables)]
                    let $d lane = Lane::$name;
                    $d body;
                })*
            };
        }

        macro_rules! each_lane_mut {
            ($d lanes:expr, ($d lane:ident, $d t:ident) => $d body:expr) => {
                $($(#[$when])? if let Some($d t) = $d lanes.$name.as_deref_mut() {
                    #[allow(unused_variables)]
                    let $d lane = Lane::$name;
                    $d body;
                })*
            };
        }

        /// As `on_lane!`, with the transport taken out of the list while the body runs.
        macro_rules! without_lane {
            ($d lanes:expr, $d lane:expr, $d t:ident => $d body:expr, $d none:expr) => {
                match $d lane {
                    $($(#[$when])? Lane::$name => match $d lanes.$name.take() {
                        Some(mut taken) => {
                            let $d t = &mut *taken;
                            let result = $d body;
                            $d lanes.$name = Some(taken);
                            result
                        }
                        None => $d none,
                    },)*
                }
            };
        }

        pub(super) use {each_lane, each_lane_mut, on_lane, on_lane_mut, without_lane};
    };
}

transports! { ($)
    // Before those that tell a peer that this endpoint closes: its copies from the peer's memory end before that.
    cuda_ipc: crate::transport::cuda_ipc::CudaIpc,
    loopback: crate::transport::loopback::Loopback,
    shm: crate::transport::shm::Shm,
    net: crate::transport::net::Net,
    #[cfg(test)]
    first: doubles::Double<201>,
    #[cfg(test)]
    second: doubles::Double<202>,
}
