//! Values that a process makes once, and keeps.
//!
//! A thread that finds none makes one. Where several do so at the same time, the value of the first stays, and the others
//! take it. So no thread waits for another one, which a forked child may not have: making a value may load a library or
//! read a file, and another thread may fork meanwhile.

use std::convert::Infallible;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

/// A value for a static.
pub(crate) struct MadeOnce<T>(AtomicPtr<T>);

impl<T: Send + Sync + 'static> MadeOnce<T> {
    pub(crate) const fn new() -> Self {
        Self(AtomicPtr::new(null_mut()))
    }

    /// The value, if it was made before.
    #[inline]
    pub(crate) fn get(&'static self) -> Option<&'static T> {
        // SAFETY: null, or a value that was published with Release, and is never changed or freed.
        unsafe { self.0.load(Ordering::Acquire).as_ref() }
    }

    /// The value, which `make` makes if there is none. It may be made in vain.
    pub(crate) fn get_or_make(&'static self, make: impl FnOnce() -> T) -> &'static T {
        match self.get_or_try_make(|| Ok::<_, Infallible>(make())) {
            Ok(value) => value,
            Err(never) => match never {},
        }
    }

    /// The same for a `make` that may fail. Errors: its own; then there is still none.
    pub(crate) fn get_or_try_make<E>(
        &'static self,
        make: impl FnOnce() -> Result<T, E>,
    ) -> Result<&'static T, E> {
        if let Some(value) = self.get() {
            return Ok(value);
        }
        let new = Box::into_raw(Box::new(make()?));
        let stored = self.0.compare_exchange(null_mut(), new, Ordering::AcqRel, Ordering::Acquire);
        let value = stored.map_or_else(|first| first, |_| new);
        if value != new {
            // SAFETY: made above, and no other thread has it.
            drop(unsafe { Box::from_raw(new) });
        }
        // SAFETY: a value that is never changed or freed.
        Ok(unsafe { &*value })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::per_process::tests::in_child;
    use std::sync::mpsc::channel;

    #[test]
    fn a_child_makes_its_own_while_a_thread_of_its_parent_is_at_it() {
        static VALUE: MadeOnce<u32> = MadeOnce::new();
        let ((begun, begins), (go, wait)) = (channel(), channel::<()>());
        let slow = std::thread::spawn(move || {
            *VALUE.get_or_make(|| {
                begun.send(()).unwrap();
                wait.recv().unwrap();
                1
            })
        });
        begins.recv().unwrap();
        assert!(in_child(|| *VALUE.get_or_make(|| 2) == 2 && VALUE.get() == Some(&2)));
        assert_eq!(VALUE.get(), None, "the child's is not this process's");
        assert_eq!(*VALUE.get_or_make(|| 3), 3, "nor does another thread wait");
        go.send(()).unwrap();
        assert_eq!(slow.join().unwrap(), 3, "the first one stays");
    }

    #[test]
    fn a_value_that_cannot_be_made_is_tried_again() {
        static VALUE: MadeOnce<String> = MadeOnce::new();
        assert_eq!(VALUE.get_or_try_make(|| Err("no")), Err("no"));
        let made = VALUE.get_or_try_make(|| Ok::<_, ()>("made".to_owned())).unwrap();
        assert_eq!(VALUE.get_or_make(|| unreachable!()), made);
    }
}
