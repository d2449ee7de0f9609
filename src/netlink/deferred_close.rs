//! Closes a netlink socket in a worker of the kernel, after the end of this process.
//!
//! Closing a netfilter socket waits for an RCU grace period of 6 to 17 ms, most of the time of a
//! DEL, and then frees all deleted objects of `nf_tables`, also the objects of other processes. An
//! `io_uring` holds the files that are registered with it, and releases them in the background
//! after it was closed. Where `io_uring` is missing or forbidden, the socket is closed at once. See
//! docs/decisions/0013-deferred-close.md.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::io_uring::{IoringRegisterOp, io_uring_params, io_uring_register, io_uring_setup};

/// Keeps a file open until some time after this value is dropped. The file's descriptor must be
/// closed before that.
#[derive(Debug)]
pub(super) struct DeferredClose {
    _ring: OwnedFd,
}

impl DeferredClose {
    /// `None` if `io_uring` is not available.
    #[expect(unsafe_code, reason = "rustix has these calls as the kernel has them")]
    pub(super) fn register_file(file: &impl AsFd) -> Option<DeferredClose> {
        let (mut params, files) = (io_uring_params::default(), [file.as_fd().as_raw_fd()]);
        // SAFETY: the parameters are not shared, and request a ring without options.
        let ring = unsafe { io_uring_setup(1, &mut params) }.ok()?;
        let files = files.as_ptr().cast();
        // SAFETY: the operation reads one descriptor, which the caller keeps open during the call.
        unsafe { io_uring_register(&ring, IoringRegisterOp::RegisterFiles, files, 1) }.ok()?;
        Some(DeferredClose { _ring: ring })
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, pipe};
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_file_is_closed_after_its_owner() {
        let (mut reader, writer) = pipe().unwrap();
        let keeper = DeferredClose::register_file(&writer).expect("this kernel has io_uring");
        drop(writer);
        let before = Instant::now();
        let closing = std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(200));
            drop(keeper);
        });
        // The end of the file comes when no process has the pipe open for writing.
        assert_eq!(reader.read(&mut [0]).unwrap(), 0);
        assert!(before.elapsed().as_millis() >= 200, "closed before");
        closing.join().unwrap();
    }
}
