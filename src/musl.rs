//! Parts of musl that the executable replaces, because they are slow: see
//! `docs/decisions/0014-before-main.md`.
#![expect(unsafe_code, reason = "an allocator, and the C library's functions that copy")]

use std::alloc::{GlobalAlloc, Layout};
use std::sync::{Mutex, MutexGuard, PoisonError};

#[cfg(all(target_arch = "x86_64", not(debug_assertions)))]
use cnibox::memcpy;
use dlmalloc::Dlmalloc;

/// musl's own allocator returns memory to the kernel with each call and gets it again with the
/// next. dlmalloc's own static variable is locked by the C library, which takes longer than this
/// mutex.
struct LockedHeap(Mutex<Dlmalloc>);

#[global_allocator]
static HEAP: LockedHeap = LockedHeap(Mutex::new(Dlmalloc::new()));

impl LockedHeap {
    fn lock(&self) -> MutexGuard<'_, Dlmalloc> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// SAFETY: dlmalloc has the same contract for a size and an alignment, and the mutex lets one thread
// call it.
unsafe impl GlobalAlloc for LockedHeap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's contract.
        unsafe { self.lock().malloc(layout.size(), layout.align()) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's contract.
        unsafe { self.lock().calloc(layout.size(), layout.align()) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract.
        unsafe { self.lock().free(pointer, layout.size(), layout.align()) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's contract.
        unsafe { self.lock().realloc(pointer, layout.size(), layout.align(), size) }
    }
}

/// In place of musl's. Without optimization the compiler may call memcpy to implement it.
///
/// # Safety
/// As of memcpy(3).
#[cfg(all(target_arch = "x86_64", not(debug_assertions)))]
#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, length: usize) -> *mut u8 {
    // SAFETY: the caller's contract.
    unsafe { memcpy::copy(to, from, length) }
}

/// musl's cannot be linked without musl's memcpy.
///
/// # Safety
/// As of memmove(3).
#[cfg(all(target_arch = "x86_64", not(debug_assertions)))]
#[unsafe(no_mangle)]
unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, length: usize) -> *mut u8 {
    // SAFETY: the caller's contract.
    unsafe { memcpy::copy_overlapping(to, from, length) }
}
