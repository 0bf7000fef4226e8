//! The pages name the variables that exist, with their defaults, and no others; FEATURES.md names tests that exist.
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

/// All Rust files under `folder`.
fn sources(folder: &Path, found: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).expect("a folder of sources") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|ext| ext == "rs") {
            found.push(std::fs::read_to_string(&path).expect("a source"));
        }
    }
}

/// Name and help of each variable: the string literals of the groups' tables.
fn variables() -> Vec<(String, String)> {
    let mut files = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut files);
    let begin = "const VARIABLES: &'static [Variable] = &[";
    let tables = files.iter().flat_map(|source| source.split(begin).skip(1));
    let tables = tables.filter_map(|table| Some(table.split_once("];")?.0));
    let literals: Vec<&str> =
        tables.flat_map(|table| table.split('"').skip(1).step_by(2)).collect();
    assert!(literals.len() > 40 && literals.len() % 2 == 0, "name and help by turns: {literals:?}");
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
fn the_man_page_has_every_variable_with_default_unit_and_example() {
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
        for unit in ["bytes", "microseconds", " seconds"].into_iter().filter(|u| help.contains(u)) {
            assert!(entry.to_lowercase().contains(unit.trim()), "{PREFIX}{name} is in {unit}");
        }
        // Whether the value is a valid one, tests/cli shows.
        let example = format!("\nExample:\n.IR {PREFIX}{name}=");
        assert!(entry.contains(&example), "{PREFIX}{name} has no example");
    }
}

/// Which tests/readme runs.
#[test]
fn the_man_page_has_the_line_of_each_mpi() {
    let (man, readme) = (read("man/fi_udrv.7").replace('\\', ""), read("README.md"));
    let (_, examples) = man.split_once(".SH EXAMPLES\n").expect("examples");
    let mpis = ["    mpirun ", "    MPIR_CVAR_CH4_NETMOD", "    I_MPI_FABRICS"];
    let lines: Vec<&str> =
        readme.lines().filter(|line| mpis.iter().any(|mpi| line.starts_with(mpi))).collect();
    assert_eq!(lines.len(), mpis.len(), "{lines:?}");
    for line in lines {
        assert!(examples.lines().any(|example| example == line.trim()), "no example: {line}");
    }
}

#[test]
fn the_man_page_has_every_option_of_an_endpoint() {
    let (man, source) = (read("man/fi_udrv.7"), read("src/ofi/endpoint/options.rs"));
    let names = source.match_indices("FI_OPT_").map(|(at, _)| &source[at..]);
    let names: BTreeSet<&str> =
        names.map(|rest| &rest[..rest.find(|c| !is_name(c)).unwrap_or(rest.len())]).collect();
    assert!(names.len() > 10, "{names:?}");
    // The level of all options.
    for name in names.into_iter().filter(|name| *name != "FI_OPT_ENDPOINT") {
        assert!(man.contains(name), "man/fi_udrv.7 has no {name}");
    }
}

#[test]
fn the_synopsis_has_every_option_of_each_command() {
    let man = read("man/udrv.1");
    let (_, synopsis) = man.split_once(".SH SYNOPSIS").expect("a synopsis");
    let (synopsis, _) = synopsis.split_once(".SH DESCRIPTION").expect("its end");
    for command in ["run", "info", "doctor", "key", "perf", "stat", "why", "top", "trace", "record"]
    {
        let folder = Path::new("crates/udrv-cli/src");
        let file = folder.join(format!("{command}.rs"));
        let file = if Path::new(env!("CARGO_MANIFEST_DIR")).join(&file).is_file() {
            file
        } else {
            folder.join(command).join("mod.rs")
        };
        let source = read(&file.to_string_lossy());
        let forms: String = synopsis
            .split(".br\n")
            .filter(|form| form.contains(&format!("udrv {command}")))
            .collect();
        let options = source.split("#[arg(").skip(1).filter(|option| option.starts_with("long"));
        let mut count = 0;
        for option in options {
            let (attributes, field) = option.split_once(")]\n").expect("a field");
            let field = field.trim_start().trim_start_matches("pub(crate) ");
            let (name, _) = field.split_once(':').expect("its type");
            let long = format!("\\-\\-{}", name.replace('_', "\\-"));
            let short = attributes.contains("short").then(|| format!("\\-{}", &name[..1]));
            let known = forms.contains(&long) || short.is_some_and(|short| forms.contains(&short));
            assert!(known, "man/udrv.1, SYNOPSIS: udrv {command} has no {long}");
            count += 1;
        }
        assert!(count > 0, "no options of {command}");
    }
}

#[test]
fn the_man_page_has_every_prov_errno() {
    let (man, header) = (read("man/fi_udrv.7"), read("include/rdma/fi_ext_udrv.h"));
    let causes = header.lines().filter_map(|line| line.trim().strip_prefix("FI_UDRV_CAUSE_"));
    let numbers: Vec<&str> =
        causes.filter_map(|cause| Some(cause.split_once(" = ")?.1.trim_end_matches(','))).collect();
    assert!(numbers.len() > 15, "{numbers:?}");
    for number in numbers {
        assert!(man.contains(&format!("\n{number}|T{{\n")), "no row for prov_errno {number}");
    }
}

#[test]
fn no_page_names_a_variable_that_does_not_exist() {
    let mut known = variable_names();
    known.extend(names_in(&read("include/rdma/fi_ext_udrv.h")));
    for page in [
        "man/fi_udrv.7",
        "README.md",
        "docs/users.md",
        "docs/administrators.md",
        "docs/slow.md",
        "docs/upstream.md",
        "CHANGELOG.md",
        "SECURITY.md",
        "ARCHITECTURE.md",
        "FEATURES.md",
        "PERFORMANCE.md",
        "PROTOCOL.md",
        "CONTRIBUTING.md",
        "tests/README.md",
    ] {
        let unknown: Vec<String> = names_in(&read(page)).difference(&known).cloned().collect();
        assert!(unknown.is_empty(), "{page}: no such variable: {unknown:?}");
    }
}

/// The first release of CHANGELOG.md is the one that Cargo.toml makes.
#[test]
fn the_changes_are_of_this_version() {
    let newest = read("CHANGELOG.md");
    let (_, newest) = newest.split_once("\n## ").expect("a release");
    let version = newest.split([',', '\n']).next();
    assert_eq!(version, Some(env!("CARGO_PKG_VERSION")));
}

/// The cells of each row of a table of three columns, without the heads.
fn rows(page: &str) -> Vec<[String; 3]> {
    page.lines()
        .filter(|line| {
            line.starts_with('|') && !line.starts_with("|---") && !line.starts_with("| feature |")
        })
        .map(|line| {
            let cells: Vec<String> =
                line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect();
            cells.try_into().unwrap_or_else(|_| panic!("not three cells: {line}"))
        })
        .collect()
}

/// What stands between backquotes.
fn quoted(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2)
}

/// Whether `file` has a test of this name, in the form that such files have.
fn has_test(file: &str, name: &str) -> bool {
    let text = read(file);
    match Path::new(file).extension().and_then(|e| e.to_str()) {
        Some("rs") => text.split("#[test]").skip(1).any(|after| {
            after.split_once("fn ").is_some_and(|(_, f)| f.starts_with(&format!("{name}(")))
        }),
        Some("c") => text.contains(&format!("{{ \"{name}\",")),
        Some("def") => text.contains(&format!("({name},")),
        _ => panic!("{file}: not a file of tests"),
    }
}

#[test]
fn features_name_tests_that_exist() {
    let (gate, root) = (read("scripts/test"), Path::new(env!("CARGO_MANIFEST_DIR")));
    let rows = rows(&read("FEATURES.md"));
    assert!(rows.len() > 40, "the tables are gone");
    for [feature, _, tests] in &rows {
        for test in quoted(tests) {
            // Names of fabtests are looked up in a run of them (scripts/fabtests --strict).
            if test.starts_with("fi_") && !test.contains('/') {
                continue;
            }
            let known = match test.split_once(": ") {
                Some((file, name)) => has_test(file, name),
                None => {
                    let program = test.split(' ').next().unwrap_or(test);
                    root.join(program).is_file()
                        && gate.lines().any(|line| {
                            let is_step = ["step ", "beside "]
                                .iter()
                                .any(|word| line.trim_start().starts_with(word));
                            is_step && line.contains(test)
                        })
                }
            };
            assert!(known, "{feature}: no such test: {test}");
        }
    }
}

/// Lines of fabtests/README.md between which scripts/fabtests --table writes.
const TABLE: [&str; 2] =
    ["<!-- made by scripts/fabtests --table: do not edit -->\n", "<!-- end of the table -->\n"];

#[test]
fn the_table_of_fabtests_is_made_and_udrv_leaves_nothing_out() {
    let page = read("fabtests/README.md");
    let (_, table) = page.split_once(TABLE[0]).expect("the table begins");
    let (table, _) = table.split_once(TABLE[1]).expect("the table ends");
    let mut whole = 0;
    for row in table.lines().filter(|line| line.starts_with("| udrv |")) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [_, libfabric, sets, pass, _, excluded, fail, rdm] = cells[..] else {
            panic!("other columns: {row}");
        };
        assert!(pass.parse::<u32>().expect("a count") > 0, "{row}");
        assert_eq!((excluded, fail), ("0", "0"), "{row}");
        let (passed, asked) = rdm.split_once(" of ").expect("some of some");
        assert_eq!(passed, asked, "{row}");
        whole += usize::from((libfabric, sets) == ("2.1", "all"));
    }
    assert_eq!(whole, 1, "one row of all tests on libfabric 2.1:\n{table}");
}
