//! An Ethernet switch between network namespaces that loses, duplicates, reorders, damages, delays and
//! paces frames. `scripts/lab` starts it; see `USAGE`.
//!
//! One thread runs one loop: it reads the frames of a host from its TAP device, passes them through the
//! [`switch`], and writes them to another host's device.
#![deny(unsafe_code)]

mod counts;
mod frame;
mod gate;
mod random;
mod settings;
mod switch;
mod tap;

use settings::{Command, Settings, Which};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;
use switch::Switch;
use tap::Tap;

const USAGE: &str = "\
lossy-link [SETTING...] NAMESPACE...

Makes a TAP device in each network namespace (a file such as /run/netns/NAME) and forwards Ethernet
frames between them. Prints `ready`, and at SIGTERM what it did to how many frames.

  --device NAME            the device's name in each namespace (eth0)
  --seed N                 repeats the dice (1)
  --control FIFO           reads lines from there: any setting without its dashes, as `loss 1%`,
                           `cut PORT`, `cut FROM:TO`, `heal [PORT|FROM:TO]`, `clear`, `counts`
  --loss P                 a frame is lost; P is a probability, 0.01 or 1%
  --burst P[:FRAMES]       a run of losses begins (8); it ends after 10 ms at the latest
  --dup P                  a frame arrives twice
  --reorder P[:FRAMES]     a frame is overtaken by up to so many (3), or is 2 ms late
  --corrupt P              a bit of a UDP payload flips: its checksum tells
  --forge P                the same, with a checksum that fits: the application has to tell
  --black-hole BYTES       a UDP datagram in an IP packet longer than that is lost, and nobody told
  --firewall PORT          no TCP connection is made to this port and those above, and nobody told
  --delay US               from a host to every other
  --rate MBIT              of each host's link, each way; beyond it frames queue
  --queue KIB              so much for a host; what is more is lost (512)
  --one-way-cut FROM:TO    frames from port FROM to port TO are lost; ports count from 0

Only what users of the network send is lost, repeated, reordered or damaged; ARP and neighbour
discovery are not. A cut loses all.
";

/// Most frames that are read from a port before the next port has its turn.
const BATCH: usize = 64;

struct Arguments {
    settings: Settings,
    cuts: Vec<String>,
    seed: u64,
    device: String,
    control: Option<PathBuf>,
    namespaces: Vec<PathBuf>,
}

fn main() -> ExitCode {
    match parse(std::env::args().skip(1)).and_then(|arguments| run(&arguments)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("lossy-link: {why}");
            ExitCode::FAILURE
        }
    }
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Arguments, String> {
    let mut arguments = Arguments {
        settings: Settings::default(),
        cuts: Vec::new(),
        seed: 1,
        device: "eth0".into(),
        control: None,
        namespaces: Vec::new(),
    };
    while let Some(word) = words.next() {
        let Some(option) = word.strip_prefix("--") else {
            arguments.namespaces.push(word.into());
            continue;
        };
        if option == "help" {
            return Err(format!("usage:\n{USAGE}"));
        }
        let value = words.next().ok_or_else(|| format!("{word} wants a value"))?;
        match option {
            "device" => arguments.device = value,
            "seed" => arguments.seed = value.parse().map_err(|_| format!("no seed: {value}"))?,
            "control" => arguments.control = Some(value.into()),
            "one-way-cut" => arguments.cuts.push(value),
            _ => match arguments.settings.with(option, &[&value])? {
                Some(settings) => arguments.settings = settings,
                None => return Err(format!("no such option: {word}\n{USAGE}")),
            },
        }
    }
    if arguments.namespaces.len() < 2 {
        return Err(format!("it takes two namespaces or more\n{USAGE}"));
    }
    Ok(arguments)
}

fn run(arguments: &Arguments) -> Result<(), String> {
    let ports = arguments.namespaces.len();
    let mut switch = Switch::new(ports, arguments.settings.clone(), arguments.seed);
    for cut in &arguments.cuts {
        switch.command(Command::Cut(Which::parse(cut, ports)?));
    }
    let mut control = match &arguments.control {
        None => None,
        Some(path) => Some(Control::open(path).map_err(|e| format!("{}: {e}", path.display()))?),
    };
    let mut taps = Vec::new();
    for namespace in &arguments.namespaces {
        let tap = Tap::create(namespace, &arguments.device);
        taps.push(tap.map_err(|e| format!("a TAP device in {}: {e}", namespace.display()))?);
    }
    tap::prepare();
    say("ready");
    let result = forward(&mut switch, &taps, control.as_mut());
    say(&switch.counts().to_string());
    result.map_err(|e| e.to_string())
}

/// Forwards frames until a signal ends the program.
fn forward(switch: &mut Switch, taps: &[Tap], mut control: Option<&mut Control>) -> io::Result<()> {
    let epoch = Instant::now();
    let now = || epoch.elapsed().as_nanos() as u64;
    let mut buffer = vec![0; frame::MAX_FRAME];
    let (mut fds, mut ready): (Vec<Option<RawFd>>, Vec<bool>) = (Vec::new(), Vec::new());
    while !tap::ended() {
        let now_ns = now();
        let mut refused = 0u64;
        let mut send = |port: usize, frame: &[u8]| {
            if !taps.get(port).is_some_and(|tap| tap.write(frame)) {
                refused += 1;
            }
        };
        switch.release(now_ns, &mut send);
        for (port, tap) in taps.iter().enumerate() {
            if !ready.get(port).copied().unwrap_or(false) {
                continue;
            }
            for _ in 0..BATCH {
                let now_ns = now();
                if !switch.may_read(port, now_ns) {
                    break;
                }
                let Some(frame) = tap.read(&mut buffer)? else { break };
                switch.on_frame(now_ns, port, frame, &mut send);
            }
        }
        (0..refused).for_each(|_| switch.refused());
        if let Some(control) = control.as_deref_mut() {
            if ready.last().copied().unwrap_or(false) {
                control.read(switch, taps.len());
            }
        }
        let now_ns = now();
        fds.clear();
        fds.extend(
            taps.iter()
                .enumerate()
                .map(|(port, tap)| switch.may_read(port, now_ns).then(|| tap.as_raw_fd())),
        );
        fds.push(control.as_deref().map(|control| control.fifo.as_raw_fd()));
        let timeout_ns = switch.next_timeout(now_ns).map(|at_ns| at_ns.saturating_sub(now_ns));
        tap::wait(&fds, timeout_ns, &mut ready);
    }
    Ok(())
}

/// The control channel: a FIFO. It is open for writing too, so that it does not end when its writers close it.
struct Control {
    fifo: File,
    /// The beginning of a line that is not complete yet.
    pending: Vec<u8>,
}

impl Control {
    fn open(path: &PathBuf) -> io::Result<Self> {
        let mut options = File::options();
        let fifo = options.read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path)?;
        Ok(Self { fifo, pending: Vec::new() })
    }

    fn read(&mut self, switch: &mut Switch, ports: usize) {
        let mut buffer = [0; 4096];
        let Ok(n) = self.fifo.read(&mut buffer) else { return };
        self.pending.extend(buffer.iter().take(n));
        while let Some(end) = self.pending.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.pending.drain(..=end).collect();
            let line = String::from_utf8_lossy(&line);
            match Command::parse(&line, switch.settings(), ports) {
                Ok(Command::Counts) => say(&switch.counts().to_string()),
                Ok(command) => {
                    say(&format!("control: {}", line.trim()));
                    switch.command(command);
                }
                Err(why) => say(&format!("control: {why}")),
            }
        }
    }
}

fn say(line: &str) {
    // An error is ignored, because the reader may have gone.
    let _ = writeln!(io::stdout(), "{line}");
}
