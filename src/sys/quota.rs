//! The share of the processors that a control group leaves to its processes (cgroups(7)): a container with the time of two
//! processors on a machine of a hundred is as crowded by three processes that poll as a machine of two.

use super::process;
use std::fs::read_to_string;

/// Where the groups that limit processor time are: of version 2, of version 1, and of version 2 beside version 1.
const ROOTS: [&str; 4] = [
    "/sys/fs/cgroup",
    "/sys/fs/cgroup/cpu",
    "/sys/fs/cgroup/cpu,cpuacct",
    "/sys/fs/cgroup/unified",
];

/// A limit that all processes of a control group share.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Quota {
    /// So many of them run all the time, rounded up; at least 1.
    pub(crate) processors: usize,
    groups: String,
}

impl Quota {
    /// The limit of this process's group and of those above it. `None`: there is none, or it cannot be read.
    pub(crate) fn here() -> Option<Self> {
        let groups = read_to_string("/proc/self/cgroup").ok()?;
        let paths = groups.lines().filter_map(path_of);
        let limits = paths.flat_map(|path| ROOTS.iter().filter_map(move |root| limit(root, path)));
        limits.min().map(|processors| Self { processors, groups: groups.clone() })
    }

    /// Whether process `pid` is in the same group.
    pub(crate) fn holds(&self, pid: i32) -> bool {
        pid > 0
            && process::proc_is_ours()
            && read_to_string(format!("/proc/{pid}/cgroup")).is_ok_and(|all| all == self.groups)
    }
}

/// The path in a line of /proc/self/cgroup, if that hierarchy may limit processor time.
fn path_of(line: &str) -> Option<&str> {
    let mut parts = line.splitn(3, ':');
    let (number, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
    let limits = number == "0" || controllers.split(',').any(|name| name == "cpu");
    limits.then_some(path.trim_end_matches('/'))
}

/// The least limit of the group `path` and of those above it. In a container the path may be one that is not seen there, and
/// the container's own group is at the root.
fn limit(root: &str, path: &str) -> Option<usize> {
    let above = path.rmatch_indices('/').map(|(end, _)| path.get(..end).unwrap_or(""));
    let groups = std::iter::once(path).chain(above);
    groups
        .filter_map(|group| processors(|name| read_to_string(format!("{root}{group}/{name}")).ok()))
        .min()
}

/// The limit that the files of one group state.
fn processors(read: impl Fn(&str) -> Option<String>) -> Option<usize> {
    let (quota, period) = match read("cpu.max") {
        Some(line) => line.trim().split_once(' ').map(|(a, b)| (a.to_owned(), b.to_owned()))?,
        None => (read("cpu.cfs_quota_us")?, read("cpu.cfs_period_us")?),
    };
    // "max" and -1 are no limit.
    let (quota, period) =
        (quota.trim().parse::<usize>().ok()?, period.trim().parse::<usize>().ok()?);
    (period > 0).then(|| quota.div_ceil(period).max(1))
}

#[cfg(test)]
impl Quota {
    /// A limit of this process's group.
    pub(crate) fn of_here(processors: usize) -> Self {
        Self { processors, groups: read_to_string("/proc/self/cgroup").unwrap_or_default() }
    }

    /// A limit of a group without processes.
    pub(crate) fn of_elsewhere(processors: usize) -> Self {
        Self { processors, groups: String::from("0::/nobody") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_of_both_versions_are_understood() {
        let with = |all: &[(&str, &str)]| {
            let find = |name: &str| all.iter().find(|(known, _)| *known == name);
            processors(|name| find(name).map(|(_, text)| (*text).to_owned()))
        };
        for (line, limit) in [
            ("max 100000\n", None),
            ("200000 100000\n", Some(2)),
            ("150000 100000\n", Some(2)),
            ("1000 100000\n", Some(1)),
            ("100000 0\n", None),
            ("100000\n", None),
            ("", None),
        ] {
            assert_eq!(with(&[("cpu.max", line)]), limit, "{line}");
        }
        let first = |quota| with(&[("cpu.cfs_quota_us", quota), ("cpu.cfs_period_us", "100000\n")]);
        assert_eq!((first("-1\n"), first("400000\n")), (None, Some(4)));
        assert_eq!(with(&[("cpu.cfs_quota_us", "400000\n")]), None);
    }

    #[test]
    fn only_hierarchies_that_limit_time_count() {
        assert_eq!(path_of("0::/user.slice/job"), Some("/user.slice/job"));
        assert_eq!(path_of("4:cpu,cpuacct:/"), Some(""));
        assert_eq!(path_of("3:cpuset:/x"), None);
        assert_eq!(path_of("nonsense"), None);
    }

    #[test]
    fn groups_above_limit_too() {
        let root = std::env::temp_dir().join(format!("udrv-quota-{}", std::process::id()));
        let below = root.join("a/b");
        std::fs::create_dir_all(&below).unwrap();
        let write = |folder: &std::path::Path, line| std::fs::write(folder.join("cpu.max"), line);
        write(&below, "800000 100000\n").unwrap();
        write(&root.join("a"), "300000 100000\n").unwrap();
        let limit = |path| super::limit(root.to_str().unwrap(), path);
        assert_eq!(
            [limit("/a/b"), limit("/a"), limit("/a/gone"), limit("")],
            [Some(3), Some(3), Some(3), None]
        );
        write(&root, "100000 100000\n").unwrap();
        assert_eq!([limit("/a/b"), limit("/elsewhere"), limit("")], [Some(1); 3]);
        std::fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn a_process_is_in_its_own_group() {
        let quota = Quota::of_here(1);
        assert!(quota.holds(std::process::id() as i32));
        assert!(!Quota::of_elsewhere(1).holds(std::process::id() as i32));
        assert!(!quota.holds(0));
    }
}
