//! A terminal that is drawn again and again, with single keys as input; as it was before when this is dropped.
#![allow(unsafe_code)] // system calls

use std::io::{IsTerminal, Write};
use std::os::fd::AsRawFd;
use std::time::Duration;

/// The other page of the terminal, without a cursor; and back (xterm's control sequences).
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";

pub(crate) struct Screen {
    before: libc::termios,
}

impl Screen {
    /// `None`: input or output is not a terminal.
    pub(crate) fn open() -> Option<Self> {
        if !std::io::stdout().is_terminal() {
            return None;
        }
        let fd = std::io::stdin().as_raw_fd();
        // SAFETY: a structure of numbers, which the call fills.
        let mut termios: libc::termios = unsafe { std::mem::zeroed() };
        // SAFETY: as above; fails for what is not a terminal.
        if unsafe { libc::tcgetattr(fd, &mut termios) } != 0 {
            return None;
        }
        let before = termios;
        // Control-C is a key, so that it, too, leaves the terminal as it was.
        termios.c_lflag &= !(libc::ICANON | libc::ECHO | libc::ISIG);
        // SAFETY: a structure that the system has filled.
        unsafe { libc::tcsetattr(fd, libc::TCSANOW, &termios) };
        write(ENTER);
        Some(Self { before })
    }

    /// Draws these lines, as far as there is room.
    pub(crate) fn draw(&self, lines: &[String]) {
        let (rows, columns) = size();
        write(&picture(lines, rows, columns));
    }

    /// The next key, if one is pressed meanwhile. Errors: there is no input any more.
    pub(crate) fn key(&self, within: Duration) -> Result<Option<u8>, String> {
        let fd = std::io::stdin().as_raw_fd();
        let mut asked = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        let within = libc::c_int::try_from(within.as_millis()).unwrap_or(libc::c_int::MAX);
        // SAFETY: one structure, for one descriptor.
        if unsafe { libc::poll(&mut asked, 1, within) } < 1 {
            return Ok(None);
        }
        let mut key = 0u8;
        // Not with a buffer, in which a key would wait that was pressed soon after another.
        // SAFETY: room for one byte.
        match unsafe { libc::read(fd, (&raw mut key).cast(), 1) } {
            1 => Ok(Some(key)),
            _ => Err("the terminal is closed".to_owned()),
        }
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        write(LEAVE);
        // SAFETY: a structure that the system has filled.
        unsafe { libc::tcsetattr(std::io::stdin().as_raw_fd(), libc::TCSANOW, &self.before) };
    }
}

/// A terminal that takes nothing any more has nobody in front of it.
fn write(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// Rows and columns of the terminal.
fn size() -> (usize, usize) {
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the call fills that structure.
    unsafe { libc::ioctl(std::io::stdout().as_raw_fd(), libc::TIOCGWINSZ, &mut size) };
    let or = |n: u16, usual: usize| if n == 0 { usual } else { n.into() };
    (or(size.ws_row, 24), or(size.ws_col, 80))
}

/// The lines over what was there before, without a line more than the terminal has.
fn picture(lines: &[String], rows: usize, columns: usize) -> String {
    let cut = |line: &str| line.chars().take(columns).collect::<String>();
    let shown = if lines.len() > rows { rows.saturating_sub(1) } else { lines.len() };
    let mut all: Vec<String> = lines.iter().take(shown).map(|line| cut(line)).collect();
    if shown < lines.len() {
        all.push(cut(&format!("... and {} lines more", lines.len() - shown)));
    }
    format!("\x1b[H{}\x1b[K\x1b[J", all.join("\x1b[K\n"))
}

#[cfg(test)]
mod tests {
    use super::picture;

    #[test]
    fn a_picture_fits_the_terminal() {
        let lines: Vec<String> = ["one", "second", "3"].map(str::to_owned).to_vec();
        assert_eq!(picture(&lines, 3, 4), "\x1b[Hone\x1b[K\nseco\x1b[K\n3\x1b[K\x1b[J");
        assert_eq!(picture(&lines, 2, 40), "\x1b[Hone\x1b[K\n... and 2 lines more\x1b[K\x1b[J");
        assert_eq!(picture(&[], 2, 4), "\x1b[H\x1b[K\x1b[J");
    }
}
