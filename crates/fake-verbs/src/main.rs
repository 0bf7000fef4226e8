//! `fake-verbs [OPTIONS] [--] COMMAND...`: runs a command, and all that it starts, with devices of the double.

use fake_verbs::{personality, read_counters, settings, sysfs, weather};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

const HELP: &str = "fake-verbs [--personality NAME] [--weather WEATHER] [--seed N] [--library FOLDER] [--counts] COMMAND...
fake-verbs --list

  --library  where the folders `current`, `28` and `15` with libibverbs.so.1 are (default: beside this program)
  --counts   prints what the devices did, to the error output
  --list     the personalities, and the weather

Fails when the command does, and with 99 after a violation.
";

/// What the command line asks for.
struct Wish {
    personality: &'static personality::Personality,
    weather: String,
    seed: String,
    library: Option<PathBuf>,
    counts: bool,
    command: Vec<OsString>,
}

fn list() {
    for personality in personality::ALL {
        println!("{:12} {}", personality.name, personality.about);
    }
    println!();
    for (name, words) in weather::NAMED {
        println!("{name:12} {words}");
    }
}

/// Error: what is wrong; empty: help is wanted.
fn parse(words: impl Iterator<Item = OsString>) -> Result<Option<Wish>, String> {
    let first = personality::ALL.first().ok_or("no personality")?;
    let mut wish = Wish {
        personality: first,
        weather: String::new(),
        seed: "1".to_owned(),
        library: None,
        counts: false,
        command: Vec::new(),
    };
    let mut words = words.peekable();
    while let Some(word) = words.next_if(|word| word.to_string_lossy().starts_with('-')) {
        let word = word.to_string_lossy().into_owned();
        let mut value = || {
            let value = words.next().ok_or_else(|| format!("{word} what?"))?;
            Ok::<_, String>(value.to_string_lossy().into_owned())
        };
        match word.as_str() {
            "--personality" => {
                let name = value()?;
                wish.personality =
                    personality::find(&name).ok_or_else(|| format!("no personality {name}"))?;
            }
            "--weather" => wish.weather = value()?,
            "--seed" => wish.seed = value()?,
            "--library" => wish.library = Some(value()?.into()),
            "--counts" => wish.counts = true,
            "--list" => return Ok(None),
            "--" => break,
            _ => return Err(String::new()),
        }
    }
    weather::Weather::parse(&wish.weather)?;
    wish.command = words.collect();
    if wish.command.is_empty() { Err(String::new()) } else { Ok(Some(wish)) }
}

/// The folder of the library with the symbols of the personality's version.
fn library(wish: &Wish) -> Result<PathBuf, String> {
    let beside = || {
        let own = std::env::current_exe().ok()?;
        Some(own.parent()?.to_owned())
    };
    let all = wish.library.clone().or_else(beside).ok_or("where is the library?")?;
    let folder = all.join(wish.personality.library.folder());
    let there = folder.join("libibverbs.so.1").exists();
    there.then_some(folder).ok_or_else(|| format!("no libibverbs.so.1 in {}", all.display()))
}

/// `first` before the paths that are there already.
fn before(first: &Path, variable: &str) -> OsString {
    let mut all = first.as_os_str().to_owned();
    if let Some(rest) = std::env::var_os(variable).filter(|rest| !rest.is_empty()) {
        all.push(":");
        all.push(rest);
    }
    all
}

/// A new directory of the run.
fn directory() -> std::io::Result<PathBuf> {
    let base = std::env::temp_dir();
    for number in 0..1000 {
        let path = base.join(format!("fake-verbs.{}.{number}", std::process::id()));
        match std::fs::create_dir(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            result => return result.map(|()| path),
        }
    }
    Err(std::io::ErrorKind::AlreadyExists.into())
}

fn run(wish: &Wish) -> Result<u8, String> {
    let library = library(wish)?;
    let directory = directory().map_err(|error| format!("no directory: {error}"))?;
    sysfs::make(&directory, wish.personality).map_err(|error| format!("no devices: {error}"))?;
    let (program, arguments) = wish.command.split_first().ok_or("no command")?;
    let status = Command::new(program)
        .args(arguments)
        // A script that sets LD_LIBRARY_PATH would lead to the machine's own library again.
        .env("LD_PRELOAD", before(&library.join("libibverbs.so.1"), "LD_PRELOAD"))
        .env("SYSFS_PATH", sysfs::root(&directory))
        .env(settings::DIRECTORY, &directory)
        .env(settings::PERSONALITY, wish.personality.name)
        .env(settings::WEATHER, &wish.weather)
        .env(settings::SEED, &wish.seed)
        .status();
    let violations = std::fs::read_to_string(directory.join("violations")).unwrap_or_default();
    if wish.counts {
        report(&directory);
    }
    let _ = std::fs::remove_dir_all(&directory);
    let status = status.map_err(|error| format!("{}: {error}", program.to_string_lossy()))?;
    if !violations.is_empty() {
        eprint!("{violations}");
        return Ok(99);
    }
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(125))
}

fn report(directory: &Path) {
    let counts = read_counters(directory);
    let words = fake_verbs::COUNTER_NAMES.iter().zip(counts).filter(|(_, count)| *count > 0);
    let words: Vec<String> = words.map(|(name, count)| format!("{name} {count}")).collect();
    eprintln!("fake-verbs: {}", words.join(", "));
}

fn main() -> ExitCode {
    let result = match parse(std::env::args_os().skip(1)) {
        Ok(Some(wish)) => run(&wish),
        Ok(None) => {
            list();
            Ok(0)
        }
        Err(what) => Err(what),
    };
    match result {
        Ok(code) => ExitCode::from(code),
        Err(what) if what.is_empty() => {
            eprint!("{HELP}");
            ExitCode::from(2)
        }
        Err(what) => {
            eprintln!("fake-verbs: {what}");
            ExitCode::from(2)
        }
    }
}
