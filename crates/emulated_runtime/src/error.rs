//! Errors: names, descriptions, and the thread's last error.

use std::ffi::{CStr, c_char, c_int};

use crate::call::{self, Code};
use crate::driver::driver;

/// Returns the name of an error.
fn name(code: Code) -> Option<&'static CStr> {
    Some(match code {
        0 => c"cudaSuccess",
        1 => c"cudaErrorInvalidValue",
        2 => c"cudaErrorMemoryAllocation",
        3 => c"cudaErrorInitializationError",
        4 => c"cudaErrorCudartUnloading",
        5 => c"cudaErrorProfilerDisabled",
        6 => c"cudaErrorProfilerNotInitialized",
        7 => c"cudaErrorProfilerAlreadyStarted",
        8 => c"cudaErrorProfilerAlreadyStopped",
        9 => c"cudaErrorInvalidConfiguration",
        10 => c"cudaErrorVersionTranslation",
        12 => c"cudaErrorInvalidPitchValue",
        13 => c"cudaErrorInvalidSymbol",
        16 => c"cudaErrorInvalidHostPointer",
        17 => c"cudaErrorInvalidDevicePointer",
        18 => c"cudaErrorInvalidTexture",
        19 => c"cudaErrorInvalidTextureBinding",
        20 => c"cudaErrorInvalidChannelDescriptor",
        21 => c"cudaErrorInvalidMemcpyDirection",
        22 => c"cudaErrorAddressOfConstant",
        23 => c"cudaErrorTextureFetchFailed",
        24 => c"cudaErrorTextureNotBound",
        25 => c"cudaErrorSynchronizationError",
        26 => c"cudaErrorInvalidFilterSetting",
        27 => c"cudaErrorInvalidNormSetting",
        28 => c"cudaErrorMixedDeviceExecution",
        31 => c"cudaErrorNotYetImplemented",
        32 => c"cudaErrorMemoryValueTooLarge",
        34 => c"cudaErrorStubLibrary",
        35 => c"cudaErrorInsufficientDriver",
        36 => c"cudaErrorCallRequiresNewerDriver",
        37 => c"cudaErrorInvalidSurface",
        43 => c"cudaErrorDuplicateVariableName",
        44 => c"cudaErrorDuplicateTextureName",
        45 => c"cudaErrorDuplicateSurfaceName",
        46 => c"cudaErrorDevicesUnavailable",
        49 => c"cudaErrorIncompatibleDriverContext",
        52 => c"cudaErrorMissingConfiguration",
        53 => c"cudaErrorPriorLaunchFailure",
        65 => c"cudaErrorLaunchMaxDepthExceeded",
        66 => c"cudaErrorLaunchFileScopedTex",
        67 => c"cudaErrorLaunchFileScopedSurf",
        68 => c"cudaErrorSyncDepthExceeded",
        69 => c"cudaErrorLaunchPendingCountExceeded",
        98 => c"cudaErrorInvalidDeviceFunction",
        100 => c"cudaErrorNoDevice",
        101 => c"cudaErrorInvalidDevice",
        102 => c"cudaErrorDeviceNotLicensed",
        103 => c"cudaErrorSoftwareValidityNotEstablished",
        127 => c"cudaErrorStartupFailure",
        200 => c"cudaErrorInvalidKernelImage",
        201 => c"cudaErrorDeviceUninitialized",
        205 => c"cudaErrorMapBufferObjectFailed",
        206 => c"cudaErrorUnmapBufferObjectFailed",
        207 => c"cudaErrorArrayIsMapped",
        208 => c"cudaErrorAlreadyMapped",
        209 => c"cudaErrorNoKernelImageForDevice",
        210 => c"cudaErrorAlreadyAcquired",
        211 => c"cudaErrorNotMapped",
        212 => c"cudaErrorNotMappedAsArray",
        213 => c"cudaErrorNotMappedAsPointer",
        214 => c"cudaErrorECCUncorrectable",
        215 => c"cudaErrorUnsupportedLimit",
        216 => c"cudaErrorDeviceAlreadyInUse",
        217 => c"cudaErrorPeerAccessUnsupported",
        218 => c"cudaErrorInvalidPtx",
        219 => c"cudaErrorInvalidGraphicsContext",
        220 => c"cudaErrorNvlinkUncorrectable",
        221 => c"cudaErrorJitCompilerNotFound",
        222 => c"cudaErrorUnsupportedPtxVersion",
        223 => c"cudaErrorJitCompilationDisabled",
        224 => c"cudaErrorUnsupportedExecAffinity",
        225 => c"cudaErrorUnsupportedDevSideSync",
        226 => c"cudaErrorContained",
        227 => c"cudaErrorInsufficientLoaderVersion",
        300 => c"cudaErrorInvalidSource",
        301 => c"cudaErrorFileNotFound",
        302 => c"cudaErrorSharedObjectSymbolNotFound",
        303 => c"cudaErrorSharedObjectInitFailed",
        304 => c"cudaErrorOperatingSystem",
        400 => c"cudaErrorInvalidResourceHandle",
        401 => c"cudaErrorIllegalState",
        402 => c"cudaErrorLossyQuery",
        500 => c"cudaErrorSymbolNotFound",
        600 => c"cudaErrorNotReady",
        700 => c"cudaErrorIllegalAddress",
        701 => c"cudaErrorLaunchOutOfResources",
        702 => c"cudaErrorLaunchTimeout",
        703 => c"cudaErrorLaunchIncompatibleTexturing",
        704 => c"cudaErrorPeerAccessAlreadyEnabled",
        705 => c"cudaErrorPeerAccessNotEnabled",
        708 => c"cudaErrorSetOnActiveProcess",
        709 => c"cudaErrorContextIsDestroyed",
        710 => c"cudaErrorAssert",
        711 => c"cudaErrorTooManyPeers",
        712 => c"cudaErrorHostMemoryAlreadyRegistered",
        713 => c"cudaErrorHostMemoryNotRegistered",
        714 => c"cudaErrorHardwareStackError",
        715 => c"cudaErrorIllegalInstruction",
        716 => c"cudaErrorMisalignedAddress",
        717 => c"cudaErrorInvalidAddressSpace",
        718 => c"cudaErrorInvalidPc",
        719 => c"cudaErrorLaunchFailure",
        720 => c"cudaErrorCooperativeLaunchTooLarge",
        721 => c"cudaErrorTensorMemoryLeak",
        800 => c"cudaErrorNotPermitted",
        801 => c"cudaErrorNotSupported",
        802 => c"cudaErrorSystemNotReady",
        803 => c"cudaErrorSystemDriverMismatch",
        804 => c"cudaErrorCompatNotSupportedOnDevice",
        805 => c"cudaErrorMpsConnectionFailed",
        806 => c"cudaErrorMpsRpcFailure",
        807 => c"cudaErrorMpsServerNotReady",
        808 => c"cudaErrorMpsMaxClientsReached",
        809 => c"cudaErrorMpsMaxConnectionsReached",
        810 => c"cudaErrorMpsClientTerminated",
        811 => c"cudaErrorCdpNotSupported",
        812 => c"cudaErrorCdpVersionMismatch",
        900 => c"cudaErrorStreamCaptureUnsupported",
        901 => c"cudaErrorStreamCaptureInvalidated",
        902 => c"cudaErrorStreamCaptureMerge",
        903 => c"cudaErrorStreamCaptureUnmatched",
        904 => c"cudaErrorStreamCaptureUnjoined",
        905 => c"cudaErrorStreamCaptureIsolation",
        906 => c"cudaErrorStreamCaptureImplicit",
        907 => c"cudaErrorCapturedEvent",
        908 => c"cudaErrorStreamCaptureWrongThread",
        909 => c"cudaErrorTimeout",
        910 => c"cudaErrorGraphExecUpdateFailure",
        911 => c"cudaErrorExternalDevice",
        912 => c"cudaErrorInvalidClusterSize",
        913 => c"cudaErrorFunctionNotLoaded",
        914 => c"cudaErrorInvalidResourceType",
        915 => c"cudaErrorInvalidResourceConfiguration",
        917 => c"cudaErrorStreamDetached",
        918 => c"cudaErrorGraphRecaptureFailure",
        919 => c"cudaErrorFabricNotReady",
        999 => c"cudaErrorUnknown",
        _ => return None,
    })
}

/// Returns the description of an error that the driver lacks (from the runtime API's documentation).
fn sentence(code: Code) -> Option<&'static CStr> {
    Some(match code {
        9 => c"invalid configuration argument",
        12 => c"invalid pitch argument",
        13 => c"invalid device symbol",
        17 => c"invalid device pointer",
        21 => c"invalid copy direction for memcpy",
        35 => c"CUDA driver version is insufficient for CUDA runtime version",
        52 => c"__global__ function call is not configured",
        98 => c"invalid device function",
        _ => return None,
    })
}

/// Returns the thread's last error and clears it.
#[unsafe(no_mangle)]
pub extern "C" fn cudaGetLastError() -> Code {
    let code = call::last();
    call::set_last(call::SUCCESS);
    code
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaPeekAtLastError() -> Code {
    call::last()
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetErrorName(code: c_int) -> *const c_char {
    name(code).unwrap_or(c"unrecognized error code").as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetErrorString(code: c_int) -> *const c_char {
    if let Some(own) = sentence(code) {
        return own.as_ptr();
    }
    let mut text = std::ptr::null();
    if let Ok(driver) = driver() {
        // SAFETY: `text` outlives the call. The driver stores null or a C string that is never freed.
        let _ = unsafe { driver.cuGetErrorString(code, &mut text) };
    }
    if text.is_null() { c"unrecognized error code".as_ptr() } else { text }
}
