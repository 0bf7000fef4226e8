//! For tests: a bulk path that never works.

use super::{Bulk, BulkCounts, BulkSink, What};
use crate::memory::SegmentList;
use crate::sys::event::Doorbell;
use crate::transport::net::agreement::message::Control;
use crate::transport::{
    Access, PeerId, Prepared, Purpose, Registered, Remote, RemoteKey, SendError,
};
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// A bulk path that never works.
#[derive(Debug)]
pub(crate) struct NoWay {
    bell: Doorbell,
    takes_ms: u64,
    ready: bool,
    /// Accesses begin, and are complete at once. Since one did, no thread may sleep.
    begins: bool,
    begun: bool,
    /// It loses this peer in each poll.
    loses: Option<PeerId>,
    /// How often it had to leave a peer, or to begin anew.
    left: Arc<AtomicUsize>,
    controls: VecDeque<(PeerId, Control)>,
}

impl NoWay {
    fn new() -> Self {
        let (bell, controls) = (Doorbell::new().unwrap(), VecDeque::new());
        Self {
            bell,
            takes_ms: 0,
            ready: false,
            begins: false,
            begun: false,
            loses: None,
            left: Arc::default(),
            controls,
        }
    }

    /// Accesses take this long, milliseconds.
    pub(crate) fn taking(takes_ms: u64) -> Box<dyn Bulk> {
        Box::new(Self { takes_ms, ..Self::new() })
    }

    /// Accesses begin, and are complete at once, but nobody hears of it.
    pub(crate) fn beginning() -> Box<dyn Bulk> {
        Box::new(Self { begins: true, ..Self::new() })
    }

    /// It has these messages to send.
    pub(crate) fn saying(controls: impl IntoIterator<Item = (PeerId, Control)>) -> Box<dyn Bulk> {
        Box::new(Self { controls: controls.into_iter().collect(), ..Self::new() })
    }

    /// It loses a peer in each poll, if one is named. Also: how often it had to leave a peer, or to begin anew.
    pub(crate) fn losing(loses: Option<PeerId>) -> (Box<dyn Bulk>, Arc<AtomicUsize>) {
        let double = Self { loses, ..Self::new() };
        let left = double.left.clone();
        (Box::new(double), left)
    }

    /// Says that it is ready, although it is not.
    pub(crate) fn claiming() -> Box<dyn Bulk> {
        Box::new(Self { ready: true, ..Self::new() })
    }
}

impl Bulk for NoWay {
    fn sizes(&self) -> (usize, usize) {
        (1 << 20, 1)
    }
    fn lane(&mut self, _: PeerId, _: u64) -> Prepared {
        Prepared::No
    }
    fn register(&mut self, _: PeerId, _: &SegmentList, _: Purpose, _: bool, _: u64) -> Registered {
        Registered::No
    }
    fn invalidate(&mut self, _: PeerId, _: &RemoteKey) {}
    fn is_current(&self, _: PeerId, _: &RemoteKey) -> bool {
        false
    }
    fn access(
        &mut self,
        _: PeerId,
        _: &SegmentList,
        _: &Remote,
        _: What,
        _: u64,
    ) -> Result<Access, SendError> {
        std::thread::sleep(Duration::from_millis(self.takes_ms));
        self.begun = self.begins;
        if self.begins { Ok(Access::Begun) } else { Err(SendError::Again) }
    }
    fn on_control(&mut self, _: PeerId, _: &[u8], _: u64, _: &mut dyn BulkSink) {}
    fn is_ready(&self, _: PeerId) -> bool {
        self.ready
    }
    fn leave(&mut self, _: PeerId, _: u64, _: &mut dyn BulkSink) {
        self.left.fetch_add(1, Ordering::Relaxed);
    }
    fn next_control(&mut self) -> Option<(PeerId, Control)> {
        self.controls.pop_front()
    }
    fn has_work(&self) -> bool {
        !self.controls.is_empty()
    }
    fn poll(&mut self, _: u64, sink: &mut dyn BulkSink) -> usize {
        self.loses.iter().map(|peer| sink.on_lost(*peer)).count()
    }
    fn renew(&mut self, _: usize, _: u64, _: &mut dyn BulkSink) {
        self.left.fetch_add(1, Ordering::Relaxed);
    }
    fn forget(&mut self, _: PeerId, _: u64, _: &mut dyn BulkSink) {}
    fn fd(&self) -> BorrowedFd<'_> {
        self.bell.fd()
    }
    fn sleep(&mut self) -> bool {
        self.controls.is_empty() && !self.begun
    }
    fn rearm(&mut self) -> bool {
        self.sleep()
    }
    fn counts(&self) -> BulkCounts {
        BulkCounts::default()
    }
    fn registrations(&self) -> Option<String> {
        None
    }
}
