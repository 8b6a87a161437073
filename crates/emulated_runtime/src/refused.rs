//! Calls that are not emulated, refused by name. Each message is printed once, so that a loop does not fill the screen.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use crate::call::{NOT_SUPPORTED, function};

/// Prints a message to the user the first time it occurs.
pub fn once(words: &str) {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    if SAID.lock().unwrap_or_else(PoisonError::into_inner).insert(words.to_owned()) {
        eprintln!("ptx-emulator: refused: {words}");
    }
}

pub fn managed_memory() {
    once("managed memory (cudaMallocManaged, __managed__) is not emulated; use cudaMalloc and copies");
}

/// Defines the functions of families, each refused with its family's reason. The arguments are ignored.
macro_rules! refused {
    ($($family:literal: $($name:ident)*;)*) => {
        $($(
            function!(fn $name() {
                once(concat!(stringify!($name), ": ", $family));
                Err(NOT_SUPPORTED)
            });
        )*)*
    };
}

refused! {
    "this call is not emulated":
        __cudaGetProcAddress __cudaRegisterUnifiedTable cudaDeviceDisablePeerAccess cudaDeviceEnablePeerAccess
        cudaDeviceFlushGPUDirectRDMAWrites cudaDeviceGetByPCIBusId cudaDeviceGetGraphMemAttribute
        cudaDeviceGetHostAtomicCapabilities cudaDeviceGetP2PAtomicCapabilities cudaDeviceGetP2PAttribute
        cudaDeviceGraphMemTrim cudaDeviceRegisterAsyncNotification cudaDeviceSetGraphMemAttribute
        cudaDeviceUnregisterAsyncNotification cudaFuncGetParamCount cudaGraphAddDependencies
        cudaGraphAddEventRecordNode cudaGraphAddEventWaitNode cudaGraphAddMemAllocNode cudaGraphAddMemFreeNode
        cudaGraphAddMemcpyNodeFromSymbol cudaGraphAddMemcpyNodeToSymbol cudaGraphAddNode
        cudaGraphChildGraphNodeGetGraph cudaGraphConditionalHandleCreate cudaGraphConditionalHandleCreate_v2
        cudaGraphDebugDotPrint cudaGraphDestroyNode cudaGraphEventRecordNodeGetEvent
        cudaGraphEventRecordNodeSetEvent cudaGraphEventWaitNodeGetEvent cudaGraphEventWaitNodeSetEvent
        cudaGraphExecChildGraphNodeSetParams cudaGraphExecEventRecordNodeSetEvent
        cudaGraphExecEventWaitNodeSetEvent cudaGraphExecGetId cudaGraphExecHostNodeSetParams
        cudaGraphExecMemcpyNodeSetParams cudaGraphExecMemcpyNodeSetParams1D
        cudaGraphExecMemcpyNodeSetParamsFromSymbol cudaGraphExecMemcpyNodeSetParamsToSymbol
        cudaGraphExecMemsetNodeSetParams cudaGraphExecNodeSetParams cudaGraphGetEdges cudaGraphGetId
        cudaGraphHostNodeGetParams cudaGraphHostNodeSetParams cudaGraphInstantiateWithParams
        cudaGraphInstantiateWithParams_ptsz cudaGraphKernelNodeCopyAttributes cudaGraphKernelNodeGetAttribute
        cudaGraphKernelNodeGetParams cudaGraphKernelNodeSetAttribute cudaGraphMemAllocNodeGetParams
        cudaGraphMemFreeNodeGetParams cudaGraphMemcpyNodeGetParams cudaGraphMemcpyNodeSetParams
        cudaGraphMemcpyNodeSetParams1D cudaGraphMemcpyNodeSetParamsFromSymbol
        cudaGraphMemcpyNodeSetParamsToSymbol cudaGraphMemsetNodeGetParams cudaGraphMemsetNodeSetParams
        cudaGraphNodeFindInClone cudaGraphNodeGetContainingGraph cudaGraphNodeGetDependencies
        cudaGraphNodeGetDependentNodes cudaGraphNodeGetEnabled cudaGraphNodeGetLocalId cudaGraphNodeGetParams
        cudaGraphNodeGetToolsId cudaGraphNodeSetEnabled cudaGraphNodeSetParams cudaGraphReleaseUserObject
        cudaGraphRemoveDependencies cudaGraphRetainUserObject cudaLaunchHostFunc_v2 cudaLaunchHostFunc_v2_ptsz
        cudaLibraryGetUnifiedFunction cudaLibraryLoadFromFile cudaLogsCurrent cudaLogsDumpToFile
        cudaLogsDumpToMemory cudaLogsRegisterCallback cudaLogsUnregisterCallback cudaMemGetDefaultMemPool
        cudaMemGetLocationInfo cudaMemGetMemPool cudaMemPoolGetAccess cudaMemSetMemPool cudaMemcpy3DBatchAsync
        cudaMemcpy3DBatchAsync_ptsz cudaMemcpy3DPeer cudaMemcpy3DPeerAsync cudaMemcpy3DPeerAsync_ptsz
        cudaMemcpy3DPeer_ptds cudaMemcpy3DWithAttributesAsync cudaMemcpy3DWithAttributesAsync_ptsz
        cudaMemcpyBatchAsync cudaMemcpyBatchAsync_ptsz cudaMemcpyWithAttributesAsync
        cudaMemcpyWithAttributesAsync_ptsz cudaMemset3DAsync cudaMemset3DAsync_ptsz
        cudaStreamBeginCaptureToGraph cudaStreamBeginCaptureToGraph_ptsz cudaStreamBeginRecaptureToGraph
        cudaStreamBeginRecaptureToGraph_ptsz cudaStreamGetAttribute cudaStreamGetAttribute_ptsz
        cudaStreamUpdateCaptureDependencies cudaStreamUpdateCaptureDependencies_ptsz cudaUserObjectCreate
        cudaUserObjectRelease cudaUserObjectRetain;
    "textures, surfaces and CUDA arrays are not emulated":
        cudaArrayGetInfo cudaArrayGetMemoryRequirements cudaArrayGetPlane cudaArrayGetSparseProperties
        cudaCreateChannelDesc cudaCreateSurfaceObject cudaCreateTextureObject cudaDestroySurfaceObject
        cudaDestroyTextureObject cudaDeviceGetTexture1DLinearMaxWidth
        cudaExternalMemoryGetMappedMipmappedArray cudaFreeArray cudaFreeMipmappedArray cudaGetChannelDesc
        cudaGetMipmappedArrayLevel cudaGetSurfaceObjectResourceDesc cudaGetTextureObjectResourceDesc
        cudaGetTextureObjectResourceViewDesc cudaGetTextureObjectTextureDesc
        cudaGraphicsResourceGetMappedMipmappedArray cudaGraphicsSubResourceGetMappedArray
        cudaGraphicsVDPAURegisterOutputSurface cudaGraphicsVDPAURegisterVideoSurface cudaMalloc3DArray
        cudaMallocArray cudaMallocMipmappedArray cudaMemcpy2DArrayToArray cudaMemcpy2DArrayToArray_ptds
        cudaMemcpy2DFromArray cudaMemcpy2DFromArrayAsync cudaMemcpy2DFromArrayAsync_ptsz
        cudaMemcpy2DFromArray_ptds cudaMemcpy2DToArray cudaMemcpy2DToArrayAsync cudaMemcpy2DToArrayAsync_ptsz
        cudaMemcpy2DToArray_ptds cudaMemcpyArrayToArray cudaMemcpyArrayToArray_ptds cudaMemcpyFromArray
        cudaMemcpyFromArrayAsync cudaMemcpyFromArrayAsync_ptsz cudaMemcpyFromArray_ptds cudaMemcpyToArray
        cudaMemcpyToArrayAsync cudaMemcpyToArrayAsync_ptsz cudaMemcpyToArray_ptds
        cudaMipmappedArrayGetMemoryRequirements cudaMipmappedArrayGetSparseProperties;
    "memory shared between processes is not emulated":
        cudaDestroyExternalMemory cudaDestroyExternalSemaphore cudaDeviceGetNvSciSyncAttributes
        cudaExternalMemoryGetMappedBuffer cudaGraphAddExternalSemaphoresSignalNode
        cudaGraphAddExternalSemaphoresWaitNode cudaGraphExecExternalSemaphoresSignalNodeSetParams
        cudaGraphExecExternalSemaphoresWaitNodeSetParams cudaGraphExternalSemaphoresSignalNodeGetParams
        cudaGraphExternalSemaphoresSignalNodeSetParams cudaGraphExternalSemaphoresWaitNodeGetParams
        cudaGraphExternalSemaphoresWaitNodeSetParams cudaImportExternalMemory cudaImportExternalSemaphore
        cudaIpcCloseMemHandle cudaIpcGetEventHandle cudaIpcGetMemHandle cudaIpcOpenEventHandle
        cudaIpcOpenMemHandle cudaMemPoolExportPointer cudaMemPoolExportToShareableHandle
        cudaMemPoolImportFromShareableHandle cudaMemPoolImportPointer cudaSignalExternalSemaphoresAsync
        cudaSignalExternalSemaphoresAsync_ptsz cudaWaitExternalSemaphoresAsync
        cudaWaitExternalSemaphoresAsync_ptsz;
    "green contexts are not emulated":
        cudaDevResourceGenerateDesc cudaDevSmResourceSplit cudaDevSmResourceSplitByCount
        cudaDeviceGetDevResource cudaDeviceGetExecutionCtx cudaExecutionCtxDestroy
        cudaExecutionCtxGetDevResource cudaExecutionCtxGetDevice cudaExecutionCtxGetId
        cudaExecutionCtxRecordEvent cudaExecutionCtxStreamCreate cudaExecutionCtxSynchronize
        cudaExecutionCtxWaitEvent cudaGreenCtxCreate cudaStreamGetDevResource cudaStreamGetDevResource_ptsz
        cudaSubgridCreate cudaSubgridWorkerGridCreate cudaSubgridWorksetCreate;
    "graphics are not emulated":
        cudaEGLStreamConsumerAcquireFrame cudaEGLStreamConsumerConnect cudaEGLStreamConsumerConnectWithFlags
        cudaEGLStreamConsumerDisconnect cudaEGLStreamConsumerReleaseFrame cudaEGLStreamProducerConnect
        cudaEGLStreamProducerDisconnect cudaEGLStreamProducerPresentFrame cudaEGLStreamProducerReturnFrame
        cudaEventCreateFromEGLSync cudaGLGetDevices cudaGLMapBufferObject cudaGLMapBufferObjectAsync
        cudaGLRegisterBufferObject cudaGLSetBufferObjectMapFlags cudaGLSetGLDevice cudaGLUnmapBufferObject
        cudaGLUnmapBufferObjectAsync cudaGLUnregisterBufferObject cudaGraphicsEGLRegisterImage
        cudaGraphicsGLRegisterBuffer cudaGraphicsGLRegisterImage cudaGraphicsMapResources
        cudaGraphicsResourceGetMappedEglFrame cudaGraphicsResourceGetMappedPointer
        cudaGraphicsResourceSetMapFlags cudaGraphicsUnmapResources cudaGraphicsUnregisterResource
        cudaVDPAUGetDevice cudaVDPAUSetVDPAUDevice;
    "managed memory is not emulated":
        cudaLibraryGetManaged cudaMemAdvise cudaMemDiscardAndPrefetchBatchAsync
        cudaMemDiscardAndPrefetchBatchAsync_ptsz cudaMemDiscardBatchAsync cudaMemDiscardBatchAsync_ptsz
        cudaMemPrefetchAsync cudaMemPrefetchAsync_ptsz cudaMemPrefetchBatchAsync
        cudaMemPrefetchBatchAsync_ptsz cudaMemRangeGetAttribute cudaMemRangeGetAttributes
        cudaStreamAttachMemAsync cudaStreamAttachMemAsync_ptsz;
}
