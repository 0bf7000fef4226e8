//! Tests that need a process of their own, because they measure or exhaust what belongs to the whole process.

use std::process::Command;

/// Runs the ignored test `name`, a whole path with the crate's name, in a process of its own, after the shell command `limit`.
/// Prints what it has measured.
pub(crate) fn run(name: &str, limit: &str) {
    let name = name.split_once("::").unwrap().1;
    let output = Command::new("sh")
        .args(["-c", &format!("{limit} && exec \"$0\" \"$@\"")])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", name, "--ignored", "--nocapture"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && told.contains("1 passed"), "{told}{text}");
    eprint!("{text}");
}
