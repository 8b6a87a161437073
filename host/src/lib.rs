//! NVFP4 grouped GEMM for mixture-of-experts models.
