//! Programs that may hang, or print more than a pipe holds.

use std::io::Read;
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

/// The status and all that the program prints. Errors: it cannot be started, or has not ended, or closed its output,
/// after `limit`; it is killed then.
pub(crate) fn output(command: &mut Command, limit: Duration) -> Result<Output, String> {
    let text = |error: std::io::Error| error.to_string();
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(text)?;
    let end = Instant::now() + limit;
    let pipes = child.stdout.take().map(drain).zip(child.stderr.take().map(drain));
    let (stdout, stderr) = pipes.ok_or("no pipes")?;
    let all =
        |from: Receiver<Vec<u8>>| from.recv_timeout(end.saturating_duration_since(Instant::now()));
    let said = || -> Result<_, RecvTimeoutError> {
        let (stdout, stderr) = (all(stdout)?, all(stderr)?);
        while child.try_wait().is_ok_and(|status| status.is_none()) {
            if Instant::now() > end {
                return Err(RecvTimeoutError::Timeout);
            }
            thread::sleep(Duration::from_millis(1));
        }
        Ok((stdout, stderr))
    };
    let said = said();
    if said.is_err() {
        let _ = child.kill();
    }
    let status = child.wait().map_err(text)?;
    let (stdout, stderr) = said.map_err(|_| format!("it has not ended for {limit:?}"))?;
    Ok(Output { status, stdout, stderr })
}

/// Reads to the end, in a thread: a process that the program leaves behind may keep the pipe open for ever.
fn drain(mut pipe: impl Read + Send + 'static) -> Receiver<Vec<u8>> {
    let (sender, receiver) = channel();
    thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = pipe.read_to_end(&mut bytes);
        let _ = sender.send(bytes);
    });
    receiver
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, limit: Duration) -> Result<Output, String> {
        output(Command::new("sh").args(["-c", script]), limit)
    }

    #[test]
    fn more_than_a_pipe_holds_arrives() {
        let both = "head -c 300000 /dev/zero >&2; head -c 300000 /dev/zero; exit 3";
        let said = shell(both, Duration::from_secs(60)).unwrap();
        assert_eq!((said.stdout.len(), said.stderr.len()), (300_000, 300_000));
        assert_eq!(said.status.code(), Some(3));
    }

    #[test]
    fn a_program_that_hangs_is_ended() {
        let begun = Instant::now();
        for script in ["exec sleep 60", "exec >&- 2>&-; exec sleep 60"] {
            assert!(shell(script, Duration::from_millis(100)).is_err());
        }
        assert!(begun.elapsed() < Duration::from_secs(30));
    }
}
