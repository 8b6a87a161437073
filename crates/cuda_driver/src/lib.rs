//! The CUDA driver, found at run time.
