//! Enums whose variants are numbers of a wire format or of a C interface.

/// An enum with a number for each variant, and the way back from a number.
macro_rules! numbered {
    (
        $(#[$attribute:meta])*
        $visible:vis enum $name:ident: $repr:ident {
            $($(#[$doc:meta])* $variant:ident = $number:literal),* $(,)?
        }
    ) => {
        $(#[$attribute])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[repr($repr)]
        $visible enum $name {
            $($(#[$doc])* $variant = $number),*
        }

        impl $name {
            #[cfg(test)]
            #[allow(dead_code)]
            $visible const ALL: &[Self] = &[$(Self::$variant),*];

            $visible const fn from_number(number: $repr) -> Option<Self> {
                match number {
                    $($number => Some(Self::$variant),)*
                    _ => None,
                }
            }
        }
    };
}

pub(crate) use numbered;
