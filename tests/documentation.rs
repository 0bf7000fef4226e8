//! The pages name the variables that exist, with their defaults, and no others.
#![allow(clippy::expect_used, clippy::indexing_slicing, clippy::panic)] // a test

use std::collections::BTreeSet;
use std::path::Path;

const PREFIX: &str = "FI_UDRV_";

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn is_name(c: char) -> bool {
    c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_'
}

/// Everything after the prefix that `text` names.
fn names_in(text: &str) -> BTreeSet<String> {
    text.match_indices(PREFIX)
        .map(|(at, _)| text[at + PREFIX.len()..].chars().take_while(|c| is_name(*c)).collect())
        .filter(|name: &String| !name.is_empty()) // FI_UDRV_*
        .collect()
}

/// Name and help of each variable: the string literals of the table in src/config.rs.
fn variables() -> Vec<(String, String)> {
    let source = read("src/config.rs");
    let (_, table) = source.split_once("const VARIABLES").expect("src/config.rs has the table");
    let (table, _) = table.split_once("\n];").expect("the table ends");
    let literals: Vec<&str> = table.split('"').skip(1).step_by(2).collect();
    assert!(
        !literals.is_empty() && literals.len() % 2 == 0,
        "name and help by turns: {literals:?}"
    );
    literals
        .chunks_exact(2)
        .map(|pair| {
            assert!(pair[0].chars().all(is_name), "not a name: {}", pair[0]);
            (pair[0].to_owned(), pair[1].to_owned())
        })
        .collect()
}

fn variable_names() -> BTreeSet<String> {
    variables().into_iter().map(|(name, _)| name).collect()
}

/// The entry of a variable in the man page: from its own line to the next entry or section.
fn man_entry<'a>(man: &'a str, name: &str) -> &'a str {
    let heading = format!("\n.TP\n.B {PREFIX}{name}\n");
    let (_, entry) = man
        .split_once(&heading)
        .unwrap_or_else(|| panic!("man/fi_udrv.7 has no entry for {PREFIX}{name}"));
    let end = ["\n.TP\n", "\n.SH "].into_iter().filter_map(|mark| entry.find(mark)).min();
    &entry[..end.unwrap_or(entry.len())]
}

#[test]
fn the_man_page_has_every_variable_with_its_default() {
    let man = read("man/fi_udrv.7");
    for (name, help) in variables() {
        let entry = man_entry(&man, &name);
        let Some((_, default)) = help.split_once("(default: ") else {
            panic!("the help of {name} names no default");
        };
        let default = default.trim_end_matches(')');
        // A default of several words is told in other words.
        if !default.contains(' ') {
            let words: Vec<&str> = entry.split(|c: char| !c.is_alphanumeric()).collect();
            assert!(words.contains(&default), "{PREFIX}{name}: the default is {default}");
        }
    }
}

#[test]
fn no_page_names_a_variable_that_does_not_exist() {
    let mut known = variable_names();
    known.extend(names_in(&read("include/rdma/fi_ext_udrv.h")));
    for page in [
        "man/fi_udrv.7",
        "README.md",
        "ARCHITECTURE.md",
        "PERFORMANCE.md",
        "PROTOCOL.md",
        "CONTRIBUTING.md",
    ] {
        let unknown: Vec<String> = names_in(&read(page)).difference(&known).cloned().collect();
        assert!(unknown.is_empty(), "{page}: no such variable: {unknown:?}");
    }
}
