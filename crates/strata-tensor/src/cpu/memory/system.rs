//! Address space of the system, in whole huge pages.

use std::ops::Range;

/// Of most processors. What is mapped begins and ends at multiples of it, so that all of it can be in huge pages: walks through small ones cost bandwidth.
pub(super) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Whether these are whole huge pages.
fn is_whole(range: &Range<usize>) -> bool {
    range.start.is_multiple_of(HUGE_PAGE_BYTES) && range.end.is_multiple_of(HUGE_PAGE_BYTES) && range.start < range.end
}

/// So many bytes of address space of which none can be touched yet, or that read as zeros. `None` if the system has none.
fn reserve(bytes: usize, protection: libc::c_int) -> Option<Range<usize>> {
    assert!(bytes > 0 && bytes.is_multiple_of(HUGE_PAGE_BYTES));
    let mapped = bytes.checked_add(HUGE_PAGE_BYTES)?;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new anonymous mapping touches no memory of ours.
    let all = unsafe { libc::mmap(std::ptr::null_mut(), mapped, protection, flags, -1, 0) };
    if all == libc::MAP_FAILED {
        return None;
    }
    let first = all.expose_provenance();
    let start = first.next_multiple_of(HUGE_PAGE_BYTES);
    // What is mapped before and behind goes back; the system maps whole pages, of which huge ones are multiples.
    for part in [first..start, start + bytes..first + mapped] {
        if !part.is_empty() {
            // SAFETY: a part of the new mapping that nobody has.
            unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(part.start), part.len()) };
        }
    }
    Some(start..start + bytes)
}

/// Maps fresh memory, which reads as zeros: whole huge pages, where the system has them. `None` if it has no such memory.
pub(super) fn map(bytes: usize) -> Option<Range<usize>> {
    let range = reserve(bytes, libc::PROT_READ | libc::PROT_WRITE)?;
    #[cfg(target_os = "linux")]
    // SAFETY: advice cannot change contents, and a refusal of it is harmless.
    unsafe {
        libc::madvise(std::ptr::with_exposed_provenance_mut(range.start), bytes, libc::MADV_HUGEPAGE)
    };
    Some(range)
}

/// Gives whole huge pages back to the system.
///
/// # Safety
///
/// They are from [`map`] or [`gather`], and nobody uses them from now on.
pub(super) unsafe fn unmap(range: Range<usize>) {
    assert!(is_whole(&range));
    // SAFETY: the caller's. Where the system refuses, they stay mapped and unused.
    unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(range.start), range.len()) };
}

/// Moves the memory of whole huge pages of several places to one new place, where it lies side by side. Their contents are kept, and nothing is cleared or asked of
/// the system but a change of its tables. `None` where it cannot; then they are gone, back to the system.
///
/// # Safety
///
/// They are from [`map`] or [`gather`], and nobody uses them from now on.
pub(super) unsafe fn gather(pieces: &[Range<usize>]) -> Option<Range<usize>> {
    assert!(pieces.iter().all(is_whole));
    let to = reserve(pieces.iter().map(Range::len).sum(), libc::PROT_NONE);
    let from: Vec<usize> = pieces.iter().flat_map(|piece| piece.clone().step_by(HUGE_PAGE_BYTES)).collect();
    let places = to.clone().into_iter().flat_map(|to| to.step_by(HUGE_PAGE_BYTES));
    // One at a time: what lies side by side may be several mappings, of which the system may move some and not the others.
    // SAFETY: the caller's; the places are parts of what was reserved, which nobody has.
    let moved = from.iter().zip(places).take_while(|&(&from, place)| unsafe { move_huge_page(from, place) }).count();
    if moved == from.len() {
        return to;
    }
    for &from in &from[moved..] {
        // SAFETY: the caller's, and it was not moved.
        unsafe { unmap(from..from + HUGE_PAGE_BYTES) };
    }
    if let Some(to) = to {
        let refused = to.start + moved * HUGE_PAGE_BYTES;
        // Whether the place of the refused one is still reserved only the system knows.
        for part in [to.start..refused, refused + HUGE_PAGE_BYTES..to.end].into_iter().filter(|part| !part.is_empty()) {
            // SAFETY: it was reserved here, and nobody has it.
            unsafe { unmap(part) };
        }
    }
    None
}

/// Moves a huge page over what is mapped at `to`, or does nothing.
#[cfg(target_os = "linux")]
unsafe fn move_huge_page(from: usize, to: usize) -> bool {
    let (old, new) = (std::ptr::with_exposed_provenance_mut(from), std::ptr::with_exposed_provenance_mut::<libc::c_void>(to));
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: the caller has both to himself.
    unsafe { libc::mremap(old, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES, flags, new) != libc::MAP_FAILED }
}

#[cfg(not(target_os = "linux"))]
unsafe fn move_huge_page(_: usize, _: usize) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes<'r>(range: &Range<usize>) -> &'r mut [u8] {
        // SAFETY: mapped by the test, which has one borrow of it at a time, until it is moved or unmapped.
        unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(range.start), range.len()) }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn what_is_gathered_lies_side_by_side_with_its_contents() {
        let mapped = [1, 3, 2].map(|pages| map(pages * HUGE_PAGE_BYTES).unwrap());
        for (i, range) in mapped.iter().enumerate() {
            assert!(is_whole(range) && bytes(range).iter().all(|&b| b == 0));
            bytes(range).fill(i as u8 + 1);
        }
        // The first, the last page of the second, and the first of the third.
        let pieces = [
            mapped[0].clone(),
            mapped[1].end - HUGE_PAGE_BYTES..mapped[1].end,
            mapped[2].start..mapped[2].start + HUGE_PAGE_BYTES,
        ];
        let left = [mapped[1].start..pieces[1].start, pieces[2].end..mapped[2].end];
        // SAFETY: they are the test's.
        let whole = unsafe { gather(&pieces) }.unwrap();
        assert!(is_whole(&whole) && whole.len() == 3 * HUGE_PAGE_BYTES);
        for (i, page) in bytes(&whole).chunks_exact(HUGE_PAGE_BYTES).enumerate() {
            assert!(page.iter().all(|&b| b == i as u8 + 1));
        }
        assert!(bytes(&left[0]).iter().all(|&b| b == 2) && bytes(&left[1]).iter().all(|&b| b == 3));
        bytes(&whole).fill(9);
        // What came of several places moves as any other.
        // SAFETY: as above.
        let whole =
            unsafe { gather(&[whole.start + HUGE_PAGE_BYTES..whole.end, whole.start..whole.start + HUGE_PAGE_BYTES]) }.unwrap();
        assert!(bytes(&whole).iter().all(|&b| b == 9));
        for range in [whole, left[0].clone(), left[1].clone()] {
            // SAFETY: as above.
            unsafe { unmap(range) };
        }
    }

    #[test]
    fn what_the_system_does_not_have_is_not_mapped() {
        assert_eq!(map(1 << 62), None);
    }
}
