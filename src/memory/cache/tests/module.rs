//! Registrations that the kernel's rv module keeps, by its double: a device reads the pages that were registered.

use super::memory::{fill, map, map_over, word};
use super::{PAGE, PLENTY};
use crate::memory::cache::{Access, Cache, Refusal, Registrar};
use crate::sys::Errno;
use crate::sys::per_process::tests::in_child;
use crate::sys::rv::double::Fabric;
use crate::sys::rv::{Region, UserCache};
use std::sync::Arc;

const LEN: usize = 4 * PAGE;
const REG_MEM: u8 = 0xf3;

/// As the registrar of a device; it refuses where that registers for one use.
struct ByModule(Arc<UserCache>);

impl Registrar for ByModule {
    type Handle = Region;

    fn register(&self, addr: usize, len: usize, access: Access) -> Result<Region, Errno> {
        let rights = [(Access::WRITE, 1), (Access::REMOTE_WRITE, 3), (Access::REMOTE_READ, 4)];
        let rights = rights.iter().filter(|(right, _)| access.contains(*right));
        let flags = rights.fold(0, |all, (_, flag)| all | flag);
        self.0.register(addr as u64, len as u64, flags).map_err(|failure| failure.errno)
    }

    fn shares(&self) -> bool {
        true
    }

    fn let_go(&self, bytes: usize) -> bool {
        self.0.let_go(bytes as u64)
    }

    fn found(&self) -> Option<(u64, u64)> {
        Some(self.0.found())
    }
}

fn cache(fabric: &Fabric) -> Cache<ByModule> {
    let module = Arc::new(fabric.cache(0, 64 << 20).unwrap());
    let generous = Access::WRITE.union(Access::REMOTE_WRITE);
    Cache::new(ByModule(module), None, PLENTY, generous).unwrap()
}

/// The word at `addr` as a device reads it by the key of a new registration.
fn sent(fabric: &Fabric, cache: &Cache<ByModule>, addr: usize) -> u64 {
    let lease = cache.get(addr, LEN, Access::READ).unwrap();
    let bytes = fabric.read(lease.handle().lkey(), addr as u64, 8);
    u64::from_ne_bytes(bytes.try_into().unwrap())
}

#[test]
fn what_is_mapped_anew_at_an_address_is_what_is_sent() {
    let fabric = Fabric::new(1);
    let cache = cache(&fabric);
    let addr = map(LEN);
    fill(addr, LEN, 1);
    let before = cache.statistics();
    assert_eq!([sent(&fabric, &cache, addr), sent(&fabric, &cache, addr)], [1, 1]);
    for stamp in 2..5 {
        fabric.changes(addr as u64, LEN as u64);
        map_over(addr, LEN);
        fill(addr, LEN, stamp);
        assert_eq!((sent(&fabric, &cache, addr), word(addr)), (stamp, stamp));
    }
    let known = cache.statistics();
    assert_eq!((known.hits - before.hits, known.misses - before.misses), (1, 4));
    assert_eq!((known.uncached, known.entries, fabric.state().in_use()), (0, 0, 0));
}

#[test]
fn sends_and_receives_share_a_registration_where_the_memory_allows_it() {
    let fabric = Fabric::new(1);
    let cache = cache(&fabric);
    let addr = map(LEN);
    let written = Access::WRITE.union(Access::REMOTE_WRITE);
    let one = cache.get(addr, LEN, Access::READ).unwrap();
    let two = cache.get(addr + PAGE, PAGE, written).unwrap();
    assert_eq!(one.handle().rkey(), two.handle().rkey());
    let constant = map(PAGE);
    fabric.fail(0, REG_MEM, libc::EFAULT, 1);
    let lease = cache.get(constant, PAGE, Access::READ).unwrap();
    assert_ne!(lease.handle().rkey(), one.handle().rkey());
    fabric.fail(0, REG_MEM, libc::EFAULT, 2);
    let refused = cache.get(constant, PAGE, written).err();
    assert_eq!(refused, Some(Refusal::Device(Errno(libc::EFAULT))));
}

#[test]
fn what_the_module_keeps_makes_room_for_other_registrations() {
    let fabric = Fabric::new(1);
    let cache = cache(&fabric);
    let addr = map(LEN);
    drop(cache.get(addr, LEN, Access::READ).unwrap());
    let kept = || fabric.state().cached();
    assert!(kept() > 0);
    let full = || if kept() > 0 { Err(Errno(libc::ENOMEM)) } else { Ok(()) };
    assert_eq!(cache.beside(LEN + PAGE, full), Ok(()));
}

#[test]
fn a_child_leaves_its_parents_registrations_to_it() {
    let fabric = Fabric::new(1);
    let cache = cache(&fabric);
    let addr = map(LEN);
    let mut lease = Some(cache.get(addr, LEN, Access::READ).unwrap());
    let mut cache = Some(cache);
    let right = in_child(|| {
        let refused = cache.as_ref().and_then(|c| c.get(addr, LEN, Access::READ).err());
        lease.take();
        cache.take();
        refused == Some(Refusal::Forked) && fabric.state().in_use() == 1
    });
    assert!(right);
    drop(lease);
    assert_eq!(fabric.state().in_use(), 0);
}
