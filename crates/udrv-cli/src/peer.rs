//! Two processes with an endpoint each: they tell each other their names by a pipe or a connection, and then exchange
//! messages over the provider. One of them leads, and the other does what it is told.

use crate::fabric::{Endpoint, Peer};
use crate::libfabric::Libfabric;
use crate::watch::{Watch, end_with_the_leader};
use crate::{Outcome, find};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

/// How long a process that has connected may take for each part of its greeting.
const GREETING: Duration = Duration::from_secs(10);

/// Messages in a row before the receiver answers.
pub(crate) const WINDOW: usize = 32;

/// What the leader asks for, as the first message of each round of work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Work {
    /// So many messages of so many bytes, each sent back.
    PingPong {
        len: usize,
        rounds: usize,
    },
    /// So many windows of messages of so many bytes, each window answered by an empty message.
    Stream {
        len: usize,
        rounds: usize,
    },
    Quit,
}

impl Work {
    const BYTES: usize = 24;

    fn encode(self) -> [u8; Self::BYTES] {
        let words: [usize; 3] = match self {
            Self::PingPong { len, rounds } => [1, len, rounds],
            Self::Stream { len, rounds } => [2, len, rounds],
            Self::Quit => [0; 3],
        };
        let mut bytes = [0; Self::BYTES];
        for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&(word as u64).to_le_bytes());
        }
        bytes
    }

    fn decode(bytes: &[u8]) -> Self {
        let word = |at: usize| {
            let word = bytes.get(8 * at..8 * at + 8).and_then(|word| word.try_into().ok());
            word.map_or(0, u64::from_le_bytes) as usize
        };
        match word(0) {
            1 => Self::PingPong { len: word(1), rounds: word(2) },
            2 => Self::Stream { len: word(1), rounds: word(2) },
            _ => Self::Quit,
        }
    }
}

/// Names the libfabric to the other process.
const LIBFABRIC: &str = "UDRV_LIBFABRIC";

/// The other process; it is ended on drop if it has not quit.
pub(crate) struct Other(Child);

impl Other {
    /// Waits for its end.
    pub(crate) fn quit(mut self, pair: &mut Pair) -> Result<(), String> {
        pair.ask(Work::Quit)?;
        self.0.wait().map(drop).map_err(|error| error.to_string())
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// An endpoint, and the one other that it talks to.
pub(crate) struct Pair {
    pub(crate) endpoint: Endpoint,
    pub(crate) other: Peer,
}

impl Pair {
    /// Opens an endpoint, and exchanges names. Both ends of `read` and `write` stay open until the processes end.
    pub(crate) fn meet(
        libfabric: &str,
        read: impl Read + AsFd,
        write: impl Write,
    ) -> Result<Self, String> {
        let mut endpoint = Endpoint::open(Libfabric::open(libfabric)?, "udrv")?;
        let other = greet(&mut endpoint, read, write)?;
        Ok(Self { endpoint, other })
    }

    /// With the first process that connects and greets as another node's `udrv perf` does.
    pub(crate) fn accept(libfabric: &str, listener: &TcpListener) -> Result<Self, String> {
        let mut endpoint = Endpoint::open(Libfabric::open(libfabric)?, "udrv")?;
        loop {
            let (stream, from) = listener.accept().map_err(text)?;
            let greeted = stream.set_read_timeout(Some(GREETING)).map_err(text);
            match greeted.and_then(|()| greet(&mut endpoint, &stream, &stream)) {
                Ok(other) => return Ok(Self { endpoint, other }),
                Err(why) => eprintln!("udrv: {from} is not udrv perf: {why}"),
            }
        }
    }

    /// With another process on this node, which this command starts.
    pub(crate) fn start(libfabric: &str) -> Result<(Self, Other), String> {
        let mut command = Command::new(std::env::current_exe().map_err(text)?);
        command.arg("peer").env(LIBFABRIC, libfabric).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut other = Other(command.spawn().map_err(text)?);
        let pipes = other.0.stdout.take().zip(other.0.stdin.as_mut()).ok_or("no pipes")?;
        Ok((Self::meet(libfabric, pipes.0, pipes.1)?, other))
    }

    /// Tells the other process what comes.
    pub(crate) fn ask(&mut self, work: Work) -> Result<(), String> {
        let bytes = work.encode();
        if let Some(to) = self.endpoint.buffer().get_mut(..Work::BYTES) {
            to.copy_from_slice(&bytes);
        }
        self.endpoint.send(self.other, Work::BYTES, 1)
    }

    /// So many messages there and back; how long that took.
    pub(crate) fn ping_pong(&mut self, len: usize, rounds: usize) -> Result<Duration, String> {
        self.ask(Work::PingPong { len, rounds })?;
        let begun = Instant::now();
        for _ in 0..rounds {
            self.endpoint.send(self.other, len, 1)?;
            self.endpoint.receive(len, 1)?;
        }
        Ok(begun.elapsed())
    }

    /// So many windows of messages, one after another; how long that took.
    pub(crate) fn stream(&mut self, len: usize, rounds: usize) -> Result<Duration, String> {
        self.ask(Work::Stream { len, rounds })?;
        let begun = Instant::now();
        for _ in 0..rounds {
            self.endpoint.send(self.other, len, WINDOW)?;
            self.endpoint.receive(0, 1)?;
        }
        Ok(begun.elapsed())
    }

    /// Does what the other process asks for, until it is told to quit.
    pub(crate) fn obey(&mut self) -> Result<(), String> {
        loop {
            self.endpoint.receive(Work::BYTES, 1)?;
            match Work::decode(self.endpoint.buffer()) {
                Work::PingPong { len, rounds } => {
                    for _ in 0..rounds {
                        self.endpoint.receive(len, 1)?;
                        self.endpoint.send(self.other, len, 1)?;
                    }
                }
                Work::Stream { len, rounds } => {
                    for _ in 0..rounds {
                        self.endpoint.receive(len, WINDOW)?;
                        self.endpoint.send(self.other, 0, 1)?;
                    }
                }
                Work::Quit => return Ok(()),
            }
        }
    }
}

/// Exchanges names, and makes the endpoint watch whether the other process lives.
fn greet(
    endpoint: &mut Endpoint,
    read: impl Read + AsFd,
    mut write: impl Write,
) -> Result<Peer, String> {
    let watch = Watch::new(read.as_fd().try_clone_to_owned().map_err(text)?);
    let hex: String = endpoint.name()?.iter().map(|byte| format!("{byte:02x}")).collect();
    writeln!(write, "{hex}").and_then(|()| write.flush()).map_err(text)?;
    let mut line = String::new();
    BufReader::new(read.take(1024)).read_line(&mut line).map_err(text)?;
    let name = bytes_of(line.trim()).ok_or("the other process did not start")?;
    let other = endpoint.insert(&name)?;
    endpoint.watch(watch);
    Ok(other)
}

fn text(error: std::io::Error) -> String {
    error.to_string()
}

/// `None`: it is not an even number of hexadecimal digits, or none.
fn bytes_of(hex: &str) -> Option<Vec<u8>> {
    if hex.is_empty() || hex.len() % 2 != 0 {
        return None;
    }
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(hex.get(at..at + 2)?, 16).ok()).collect()
}

/// `udrv peer`: the process that obeys, by its standard input and output.
pub(crate) fn run() -> Outcome {
    end_with_the_leader();
    let libfabric = std::env::var(LIBFABRIC).unwrap_or_else(|_| find::LIBFABRIC.to_owned());
    Pair::meet(&libfabric, std::io::stdin(), std::io::stdout())?.obey()?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_arrives_as_it_was_asked_for() {
        for work in [
            Work::PingPong { len: 8, rounds: 1000 },
            Work::Stream { len: 1 << 20, rounds: 3 },
            Work::Quit,
        ] {
            assert_eq!(Work::decode(&work.encode()), work);
        }
    }

    #[test]
    fn names_are_hexadecimal() {
        assert_eq!(bytes_of("00ff10"), Some(vec![0, 255, 16]));
        assert_eq!(bytes_of(""), None);
        assert_eq!(bytes_of("abc"), None);
        assert_eq!(bytes_of("zz"), None);
    }
}
