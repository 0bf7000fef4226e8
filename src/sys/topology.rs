//! The distance of devices: NUMA nodes, as the kernel shows them.

/// Distance from the processor that runs this thread to memory node `node`, as firmware states it:
/// 10 is the same node. `None` if unknown.
pub(crate) fn numa_distance(node: u32) -> Option<u32> {
    let here = current_node()?;
    let path = format!("/sys/devices/system/node/node{here}/distance");
    let text = std::fs::read_to_string(path).ok()?;
    // One number for each node that is online, in order.
    let online = std::fs::read_to_string("/sys/devices/system/node/online").ok()?;
    let at = parse_list(online.trim()).into_iter().position(|n| n == node)?;
    text.split_whitespace().nth(at)?.parse().ok()
}

fn current_node() -> Option<u32> {
    let (mut cpu, mut node) = (0u32, 0u32);
    // SAFETY: fills two live locals; the third argument is unused since Linux 2.6.24.
    let rc = unsafe {
        libc::syscall(libc::SYS_getcpu, &raw mut cpu, &raw mut node, std::ptr::null_mut::<u8>())
    };
    (rc == 0).then_some(node)
}

/// The numbers of a list such as `0-2,5`.
fn parse_list(text: &str) -> Vec<u32> {
    let mut all = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.parse::<u32>(), last.parse::<u32>()) {
            all.extend(first..=last.min(first.saturating_add(4096)));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_the_kernel() {
        assert_eq!(parse_list("0"), [0]);
        assert_eq!(parse_list("0-2,5"), [0, 1, 2, 5]);
        assert_eq!(parse_list(""), []);
        assert_eq!(parse_list("x-y,7"), [7]);
    }

    #[test]
    fn here_is_nearest() {
        if let Some(node) = current_node().filter(|_| numa_distance(0).is_some()) {
            assert!(numa_distance(node).is_some_and(|distance| distance <= 255));
        }
        assert_eq!(numa_distance(u32::MAX), None);
    }
}
