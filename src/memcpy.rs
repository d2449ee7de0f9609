//! memcpy(3) and memmove(3) for x86-64, fast for few bytes. The executable exports them in place of
//! musl's, whose `rep movsq` takes 50 to 100 ns for a few bytes.
#![expect(unsafe_code, reason = "they copy between pointers")]

use std::arch::asm;

/// The largest number of bytes that are copied by pairs of loads and stores; more are copied by
/// `rep movsb`.
const FEW: usize = 32;

/// memcpy(3), which copies from the first byte to the last if they are more than [`FEW`].
///
/// # Safety
/// As of memcpy(3).
#[inline]
pub unsafe fn copy(to: *mut u8, from: *const u8, length: usize) -> *mut u8 {
    if length <= FEW {
        // SAFETY: the caller's contract.
        unsafe { copy_few(to, from, length) };
    } else {
        // SAFETY: the caller's contract. The direction flag is clear when a function is called.
        unsafe {
            asm!("rep movsb", inout("rcx") length => _, inout("rdi") to => _, inout("rsi") from => _,
                options(nostack, preserves_flags));
        }
    }
    to
}

/// memmove(3).
///
/// # Safety
/// As of memmove(3).
#[inline]
pub unsafe fn copy_overlapping(to: *mut u8, from: *const u8, length: usize) -> *mut u8 {
    // Only a target behind the start of the source overwrites bytes that are still to be read.
    if length <= FEW || to.addr().wrapping_sub(from.addr()) >= length {
        // SAFETY: the caller's contract; few bytes are all read first.
        return unsafe { copy(to, from, length) };
    }
    // SAFETY: the caller's contract: from the last byte to the first. The direction flag is clear
    // again.
    unsafe {
        asm!("std", "rep movsb", "cld", inout("rcx") length => _, inout("rdi") to.add(length - 1) => _,
            inout("rsi") from.add(length - 1) => _, options(nostack));
    }
    to
}

/// Copies up to [`FEW`] bytes, which may overlap.
#[inline]
unsafe fn copy_few(to: *mut u8, from: *const u8, length: usize) {
    // SAFETY: each arm reads and writes within `length` bytes.
    unsafe {
        match length {
            0 => {}
            1 => to.write(from.read()),
            2..=3 => copy_ends::<u16>(to, from, length),
            4..=7 => copy_ends::<u32>(to, from, length),
            8..=15 => copy_ends::<u64>(to, from, length),
            _ => copy_ends::<u128>(to, from, length),
        }
    }
}

/// Copies the first and the last `T`, which share bytes unless `length` is that of two. Both are
/// read before one is written.
#[inline]
unsafe fn copy_ends<T: Copy>(to: *mut u8, from: *const u8, length: usize) {
    let last = length - size_of::<T>();
    // SAFETY: `length` is that of one to two `T`.
    unsafe {
        let (start, end) =
            (from.cast::<T>().read_unaligned(), from.add(last).cast::<T>().read_unaligned());
        to.cast::<T>().write_unaligned(start);
        to.add(last).cast::<T>().write_unaligned(end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All lengths around the limits, and all distances between source and target.
    #[test]
    fn copies_equal_those_of_slices() {
        for length in 0..=80 {
            for to in 0..=100 {
                let mut bytes: Vec<u8> = (0..200).collect();
                let mut expected = bytes.clone();
                expected.copy_within(60..60 + length, to);
                let start = bytes.as_mut_ptr();
                // SAFETY: both ranges end before 200.
                let target = unsafe { copy_overlapping(start.add(to), start.add(60), length) };
                assert_eq!(
                    (target.addr() - start.addr(), bytes),
                    (to, expected),
                    "{length} bytes to {to}"
                );
            }
            let (source, mut target): (Vec<u8>, _) = ((1..=200).collect(), vec![0; 200]);
            // SAFETY: both have 200 bytes.
            unsafe { copy(target.as_mut_ptr().add(9), source.as_ptr().add(7), length) };
            let mut expected = vec![0; 200];
            expected[9..9 + length].copy_from_slice(&source[7..7 + length]);
            assert_eq!(target, expected, "{length} bytes");
        }
    }
}
