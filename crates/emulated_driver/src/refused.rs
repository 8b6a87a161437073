//! Functions that are not emulated, refused by name.

use crate::call::{Needs, enter, functions};
use crate::code::NOT_SUPPORTED;
use crate::refusal::once;

/// Defines the functions of families, each refused with its family's reason. The arguments are ignored.
macro_rules! refused {
    ($($family:literal: $($name:ident)*;)*) => {
        functions! {
            $($(
                fn $name() {
                    drop(enter(NAME, Needs::Nothing)?);
                    once(concat!(stringify!($name), ": ", $family));
                    Err(NOT_SUPPORTED)
                }
            )*)*
        }
    };
}

refused! {
    "textures, surfaces and CUDA arrays are not emulated":
        cuArray3DCreate_v2 cuArray3DGetDescriptor_v2 cuArrayCreate_v2 cuArrayDestroy cuArrayGetDescriptor_v2
        cuArrayGetMemoryRequirements cuArrayGetPlane cuArrayGetSparseProperties
        cuDeviceGetTexture1DLinearMaxWidth cuExternalMemoryGetMappedMipmappedArray
        cuGraphicsResourceGetMappedMipmappedArray cuGraphicsSubResourceGetMappedArray cuMemMapArrayAsync
        cuMipmappedArrayCreate cuMipmappedArrayDestroy cuMipmappedArrayGetLevel
        cuMipmappedArrayGetMemoryRequirements cuMipmappedArrayGetSparseProperties cuSurfObjectCreate
        cuSurfObjectDestroy cuSurfObjectGetResourceDesc cuTexObjectCreate cuTexObjectDestroy
        cuTexObjectGetResourceDesc cuTexObjectGetResourceViewDesc cuTexObjectGetTextureDesc;
    "this call is not emulated":
        cuCheckpointOperationComplete cuCheckpointProcessCheckpoint cuCheckpointProcessGetRestoreThreadId
        cuCheckpointProcessGetState cuCheckpointProcessLock cuCheckpointProcessRestore
        cuCheckpointProcessUnlock cuCoredumpDeregisterCompleteCallback cuCoredumpDeregisterStartCallback
        cuCoredumpGetAttribute cuCoredumpGetAttributeGlobal cuCoredumpRegisterCompleteCallback
        cuCoredumpRegisterStartCallback cuCoredumpSetAttribute cuCoredumpSetAttributeGlobal
        cuCtxDisablePeerAccess cuCtxRecordEvent cuCtxWaitEvent cuDeviceGetByPCIBusId
        cuDeviceGetGraphMemAttribute cuDeviceGetHostAtomicCapabilities cuDeviceGetLuid
        cuDeviceGetNvSciSyncAttributes cuDeviceGetP2PAtomicCapabilities cuDeviceGetP2PAttribute
        cuDeviceGraphMemTrim cuDeviceRegisterAsyncNotification cuDeviceSetGraphMemAttribute
        cuDeviceUnregisterAsyncNotification cuFlushGPUDirectRDMAWrites cuGraphAddDependencies_v2
        cuGraphAddEventRecordNode cuGraphAddEventWaitNode cuGraphAddMemAllocNode cuGraphAddMemFreeNode
        cuGraphAddNode_v2 cuGraphAddNode_v3 cuGraphChildGraphNodeGetGraph cuGraphConditionalHandleCreate
        cuGraphDebugDotPrint cuGraphDestroyNode cuGraphEventRecordNodeGetEvent cuGraphEventRecordNodeSetEvent
        cuGraphEventWaitNodeGetEvent cuGraphEventWaitNodeSetEvent cuGraphExecChildGraphNodeSetParams
        cuGraphExecEventRecordNodeSetEvent cuGraphExecEventWaitNodeSetEvent cuGraphExecGetFlags
        cuGraphExecGetId cuGraphExecHostNodeSetParams cuGraphExecNodeSetParams cuGraphGetEdges_v2 cuGraphGetId
        cuGraphHostNodeGetParams cuGraphHostNodeSetParams cuGraphInstantiate cuGraphKernelNodeCopyAttributes
        cuGraphKernelNodeGetAttribute cuGraphKernelNodeGetParams_v2 cuGraphKernelNodeSetAttribute
        cuGraphMemAllocNodeGetParams cuGraphMemFreeNodeGetParams cuGraphMemcpyNodeGetParams
        cuGraphMemsetNodeGetParams cuGraphNodeFindInClone cuGraphNodeGetContainingGraph
        cuGraphNodeGetDependencies_v2 cuGraphNodeGetDependentNodes_v2 cuGraphNodeGetEnabled
        cuGraphNodeGetLocalId cuGraphNodeGetParams cuGraphNodeGetToolsId cuGraphNodeSetEnabled
        cuGraphNodeSetParams cuGraphNodeSetParams_v2 cuGraphReleaseUserObject cuGraphRemoveDependencies_v2
        cuGraphRetainUserObject cuLaunchHostFunc_v2 cuLibraryGetUnifiedFunction cuLogsCurrent cuLogsDumpToFile
        cuLogsDumpToMemory cuLogsRegisterCallback cuLogsUnregisterCallback cuMemBatchDecompressAsync
        cuMemGetDefaultMemPool cuMemGetMemPool cuMemPoolGetAccess cuMemSetMemPool cuMemcpy2D cuMemcpy2DAsync
        cuMemcpy2DUnaligned cuMemcpy3D cuMemcpy3DAsync cuMemcpy3DBatchAsync cuMemcpy3DPeer cuMemcpy3DPeerAsync
        cuMemcpy3DWithAttributesAsync cuMemcpyAtoA cuMemcpyAtoD cuMemcpyAtoH cuMemcpyAtoHAsync
        cuMemcpyBatchAsync cuMemcpyDtoA cuMemcpyDtoD cuMemcpyDtoDAsync cuMemcpyDtoH cuMemcpyDtoHAsync
        cuMemcpyHtoA cuMemcpyHtoAAsync cuMemcpyHtoD cuMemcpyHtoDAsync cuMemcpyPeer cuMemcpyPeerAsync
        cuMemcpyWithAttributesAsync cuMemsetD16 cuMemsetD2D16 cuMemsetD2D32 cuMemsetD2D8 cuMemsetD32
        cuMemsetD8 cuOccupancyMaxPotentialBlockSizeWithFlags cuStreamBeginCapture cuStreamBeginCaptureToCig
        cuStreamBeginCaptureToGraph cuStreamBeginRecaptureToGraph cuStreamEndCaptureToCig cuStreamGetAttribute
        cuStreamGetCaptureInfo cuStreamGetCtx_v2 cuStreamUpdateCaptureDependencies cuTensorMapEncodeIm2colWide
        cuTensorMapSetAllocationClass cuUserObjectCreate cuUserObjectRelease cuUserObjectRetain;
    "green contexts are not emulated":
        cuCtxFromGreenCtx cuCtxGetDevResource cuCtxGetExecAffinity cuDevResourceGenerateDesc
        cuDevSmResourceSplit cuDevSmResourceSplitByCount cuDeviceGetDevResource cuDeviceGetExecAffinitySupport
        cuGreenCtxCreate cuGreenCtxDestroy cuGreenCtxGetDevResource cuGreenCtxGetId cuGreenCtxRecordEvent
        cuGreenCtxStreamCreate cuGreenCtxWaitEvent cuStreamGetDevResource cuStreamGetGreenCtx;
    "memory shared between processes is not emulated":
        cuDestroyExternalMemory cuDestroyExternalSemaphore cuDeviceGetCliqueCount cuDeviceGetCliqueInfo
        cuExternalMemoryGetMappedBuffer cuFabricCpyBatchAsync cuGraphAddExternalSemaphoresSignalNode
        cuGraphAddExternalSemaphoresWaitNode cuGraphExecExternalSemaphoresSignalNodeSetParams
        cuGraphExecExternalSemaphoresWaitNodeSetParams cuGraphExternalSemaphoresSignalNodeGetParams
        cuGraphExternalSemaphoresSignalNodeSetParams cuGraphExternalSemaphoresWaitNodeGetParams
        cuGraphExternalSemaphoresWaitNodeSetParams cuImportExternalMemory cuImportExternalSemaphore
        cuIpcCloseMemHandle cuIpcGetEventHandle cuIpcGetMemHandle cuIpcOpenEventHandle cuIpcOpenMemHandle_v2
        cuLogicalEndpointAddDevice cuLogicalEndpointBindAddr cuLogicalEndpointBindMem cuLogicalEndpointCreate
        cuLogicalEndpointDestroy cuLogicalEndpointExport cuLogicalEndpointGetLimits cuLogicalEndpointIdRelease
        cuLogicalEndpointIdReserve cuLogicalEndpointImport cuLogicalEndpointQuery cuLogicalEndpointUnbind
        cuMemExportToShareableHandle cuMemImportFromShareableHandle cuMemPoolExportPointer
        cuMemPoolExportToShareableHandle cuMemPoolImportFromShareableHandle cuMemPoolImportPointer
        cuMulticastAddDevice cuMulticastBindAddr cuMulticastBindAddr_v2 cuMulticastBindMem
        cuMulticastBindMem_v2 cuMulticastCreate cuMulticastGetGranularity cuMulticastUnbind
        cuSignalExternalSemaphoresAsync cuWaitExternalSemaphoresAsync;
    "stream memory operations are not emulated":
        cuGraphAddBatchMemOpNode cuGraphBatchMemOpNodeGetParams cuGraphBatchMemOpNodeSetParams
        cuGraphExecBatchMemOpNodeSetParams cuStreamBatchMemOp cuStreamWaitValue32 cuStreamWaitValue64
        cuStreamWriteValue32 cuStreamWriteValue64;
    "graphics are not emulated":
        cuGraphicsMapResources cuGraphicsResourceGetMappedPointer_v2 cuGraphicsResourceSetMapFlags_v2
        cuGraphicsUnmapResources cuGraphicsUnregisterResource;
    "managed memory is not emulated":
        cuLibraryGetManaged cuMemAdvise_v2 cuMemDiscardAndPrefetchBatchAsync cuMemDiscardBatchAsync
        cuMemPrefetchAsync cuMemPrefetchBatchAsync cuMemRangeGetAttribute cuMemRangeGetAttributes;
    "virtual memory management is not emulated":
        cuMemAddressFree cuMemAddressReserve cuMemCreate cuMemGetAccess cuMemGetAllocationGranularity
        cuMemGetAllocationPropertiesFromHandle cuMemGetHandleForAddressRange cuMemMap cuMemRelease
        cuMemRetainAllocationHandle cuMemSetAccess cuMemUnmap;
}
