//! How much memory there is.

/// Bytes of memory: what is installed, or less where a container is held to less.
pub fn memory_bytes() -> u64 {
    // SAFETY: `sysconf` reads a constant of the system.
    let (pages, page_bytes) = unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    let installed = u64::try_from(pages).unwrap_or(0).saturating_mul(u64::try_from(page_bytes).unwrap_or(0));
    container_limits().fold(installed, u64::min)
}

/// Limits of the control groups, in both of their versions; a group without a limit says `max`, or a number beyond all memory.
fn container_limits() -> impl Iterator<Item = u64> {
    ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"]
        .into_iter()
        .filter_map(|path| std::fs::read_to_string(path).ok()?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_has_memory() {
        assert!(memory_bytes() > 64 << 20);
    }
}
