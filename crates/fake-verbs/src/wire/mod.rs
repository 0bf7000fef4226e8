//! Frames between the processes of a run: each listens on a Unix socket, and connects to those that it sends to. The
//! number of the socket is in the upper half of the process's queue pair numbers.
//!
//! Nothing blocks: frames that the kernel has no room for wait here. Frames to a process that has ended are lost, as on
//! a network.

mod frame;

pub(crate) use frame::{Body, Frame, Request, Route, Verdict};

use crate::sys::Watch;
use std::collections::{HashMap, VecDeque};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// Bits of a queue pair's number that count the pairs of a process.
pub(crate) const PAIR_BITS: u32 = 12;
/// Processes of a run.
const PROCESSES_MAX: u32 = 1 << (24 - PAIR_BITS);
/// Token of the listener; connections have those above.
const LISTENER: u64 = 0;
/// Bytes that wait for a process before datagrams to it are dropped.
const QUEUE_MAX: usize = 8 << 20;

/// A connection to a process, for what goes there.
#[derive(Debug)]
struct Outgoing {
    stream: UnixStream,
    waiting: VecDeque<Vec<u8>>,
    /// Bytes of the first that are gone.
    gone: usize,
    bytes: usize,
}

/// A connection of a process to this one.
#[derive(Debug)]
struct Incoming {
    stream: UnixStream,
    buffer: Vec<u8>,
}

/// The sockets of this process.
#[derive(Debug)]
pub(crate) struct Wire {
    directory: PathBuf,
    number: u32,
    listener: UnixListener,
    outgoing: HashMap<u32, Outgoing>,
    incoming: HashMap<u64, Incoming>,
    next_token: u64,
    watch: Watch,
    /// Frames to this process itself.
    own: VecDeque<Frame>,
}

impl Wire {
    /// Opens it in the run's `directory`. `None` without it, or when it is full.
    pub(crate) fn open(directory: &Path) -> Option<Self> {
        let directory = directory.join("wire");
        let (number, listener) = (1..PROCESSES_MAX).find_map(|number| {
            UnixListener::bind(directory.join(number.to_string())).ok().map(|made| (number, made))
        })?;
        listener.set_nonblocking(true).ok()?;
        let watch = Watch::new()?;
        watch.add(listener.as_fd(), LISTENER, false);
        Some(Self {
            directory,
            number,
            listener,
            outgoing: HashMap::new(),
            incoming: HashMap::new(),
            next_token: LISTENER + 1,
            watch,
            own: VecDeque::new(),
        })
    }

    /// The number of this process in the run.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Descriptors to wait for.
    pub(crate) fn watch(&self) -> &Watch {
        &self.watch
    }

    /// Sends it, or keeps it until there is room. False: it is lost.
    pub(crate) fn send(&mut self, frame: Frame) -> bool {
        let process = frame.route.to >> PAIR_BITS;
        if process == self.number {
            self.own.push_back(frame);
            return true;
        }
        let Some(peer) = self.connection(process) else { return false };
        if peer.bytes > QUEUE_MAX && matches!(frame.body, Body::Datagram { .. }) {
            return false;
        }
        let body = frame.encode();
        let mut bytes = Vec::with_capacity(body.len() + 8);
        bytes.extend((body.len() as u64).to_le_bytes());
        bytes.extend(body);
        peer.bytes += bytes.len();
        peer.waiting.push_back(bytes);
        self.flush_to(process)
    }

    fn connection(&mut self, process: u32) -> Option<&mut Outgoing> {
        if !self.outgoing.contains_key(&process) {
            let stream = UnixStream::connect(self.directory.join(process.to_string())).ok()?;
            stream.set_nonblocking(true).ok()?;
            let token = self.next_token;
            self.next_token += 1;
            self.watch.add(stream.as_fd(), token, true);
            let new = Outgoing { stream, waiting: VecDeque::new(), gone: 0, bytes: 0 };
            self.outgoing.insert(process, new);
        }
        self.outgoing.get_mut(&process)
    }

    /// False: the process is gone.
    fn flush_to(&mut self, process: u32) -> bool {
        let alive = self.outgoing.get_mut(&process).is_some_and(Outgoing::flush);
        if !alive {
            self.outgoing.remove(&process);
        }
        alive
    }

    /// Sends what waits.
    pub(crate) fn flush(&mut self) {
        self.outgoing.retain(|_, peer| peer.flush());
    }

    /// Frames that wait for room in the kernel.
    #[cfg(test)]
    fn is_blocked(&self) -> bool {
        self.outgoing.values().any(|peer| !peer.waiting.is_empty())
    }

    /// Frames that have arrived.
    pub(crate) fn receive(&mut self) -> Vec<Frame> {
        let mut frames: Vec<Frame> = self.own.drain(..).collect();
        for token in self.watch.ready(0) {
            if token == LISTENER {
                self.accept();
            } else if self.incoming.get_mut(&token).is_some_and(|peer| !peer.read(&mut frames)) {
                self.incoming.remove(&token);
            }
        }
        frames
    }

    fn accept(&mut self) {
        while let Ok((stream, _)) = self.listener.accept() {
            if stream.set_nonblocking(true).is_ok() {
                self.watch.add(stream.as_fd(), self.next_token, false);
                self.incoming.insert(self.next_token, Incoming { stream, buffer: Vec::new() });
                self.next_token += 1;
            }
        }
    }
}

impl Outgoing {
    /// Writes what the kernel takes. False: the process is gone.
    fn flush(&mut self) -> bool {
        while let Some(first) = self.waiting.front() {
            let rest = first.get(self.gone..).unwrap_or_default();
            match self.stream.write(rest) {
                Ok(n) if n < rest.len() => self.gone += n,
                Ok(_) => {
                    self.bytes -= first.len();
                    self.gone = 0;
                    self.waiting.pop_front();
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return true,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        true
    }
}

impl Incoming {
    /// Reads what is there, a bounded amount. False: the process is gone.
    fn read(&mut self, frames: &mut Vec<Frame>) -> bool {
        let mut room = [0; 1 << 16];
        let mut alive = true;
        for _ in 0..16 {
            match self.stream.read(&mut room) {
                Ok(0) => alive = false,
                Ok(n) => {
                    self.buffer.extend(room.get(..n).unwrap_or_default());
                    if n == room.len() {
                        continue;
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => alive = error.kind() == ErrorKind::WouldBlock,
            }
            break;
        }
        self.cut(frames);
        alive
    }

    /// Takes whole frames out of the buffer.
    fn cut(&mut self, frames: &mut Vec<Frame>) {
        let mut at = 0;
        while let Some((frame, next)) = whole(&self.buffer, at) {
            frames.extend(Frame::decode(frame));
            at = next;
        }
        self.buffer.drain(..at);
    }
}

/// The frame at `at`, and where the next one begins.
fn whole(buffer: &[u8], at: usize) -> Option<(&[u8], usize)> {
    let len = buffer.get(at..at + 8)?;
    let len = u64::from_le_bytes(len.try_into().ok()?) as usize;
    Some((buffer.get(at + 8..at + 8 + len)?, at + 8 + len))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_travel_and_those_to_nobody_are_lost() {
        let directory = std::env::temp_dir().join(format!("fake-wire-{}", std::process::id()));
        std::fs::create_dir_all(directory.join("wire")).unwrap();
        let (mut one, mut two) = (Wire::open(&directory).unwrap(), Wire::open(&directory).unwrap());
        let to = |process: u32| Route { to: process << PAIR_BITS | 1, ..Route::default() };
        let body = || Body::Datagram { qkey: 1, bytes: vec![7; 100_000] };
        for _ in 0..50 {
            assert!(one.send(Frame { route: to(two.number()), body: body() }));
        }
        assert!(one.send(Frame { route: to(one.number()), body: body() }));
        assert!(!one.send(Frame { route: to(99), body: body() }));
        assert_eq!(one.receive().len(), 1);
        let mut arrived = 0;
        for _ in 0..10_000 {
            arrived += two.receive().len();
            one.flush();
        }
        assert_eq!((arrived, one.is_blocked()), (50, false));
        drop(two);
        assert!(!one.send(Frame { route: to(2), body: body() }), "its process has ended");
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
