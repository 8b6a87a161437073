//! Graphs, captured or built from nodes.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::ptr;

use crate::call::{Code, INVALID_VALUE, functions, get, put};
use crate::copy::{Copy3d, Copy3dParameters};
use crate::driver::ready;
use crate::registration::kernel;
use crate::types::{Dim3, Handle, Stream};

/// `cudaKernelNodeParams`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct KernelNode {
    function: *const c_void,
    grid: Dim3,
    block: Dim3,
    shared_bytes: c_uint,
    parameters: *const *const c_void,
    extra: *const *const c_void,
}

/// `CUDA_KERNEL_NODE_PARAMS`.
#[repr(C)]
struct DriverKernelNode {
    function: Handle,
    grid: Dim3,
    block: Dim3,
    shared_bytes: c_uint,
    parameters: *const *const c_void,
    extra: *const *const c_void,
    kernel: Handle,
    context: Handle,
}

impl KernelNode {
    fn for_driver(self) -> Result<DriverKernelNode, Code> {
        let Self { function, grid, block, shared_bytes, parameters, extra } = self;
        let kernel = kernel(function)?;
        Ok(DriverKernelNode { function: 0, grid, block, shared_bytes, parameters, extra, kernel, context: 0 })
    }
}

functions! {
    fn cudaStreamBeginCapture, cudaStreamBeginCapture_ptsz(stream: Stream, mode: c_int) {
        ready()?.cuStreamBeginCapture_v2(stream.0, mode)
    }
    fn cudaStreamEndCapture, cudaStreamEndCapture_ptsz(stream: Stream, graph: *mut Handle) {
        ready()?.cuStreamEndCapture(stream.0, graph)
    }
    fn cudaStreamIsCapturing, cudaStreamIsCapturing_ptsz(stream: Stream, status: *mut c_int) {
        ready()?.cuStreamIsCapturing(stream.0, status)
    }
    fn cudaStreamGetCaptureInfo, cudaStreamGetCaptureInfo_ptsz(
        stream: Stream, status: *mut c_int, id: *mut u64, graph: *mut Handle, nodes: *mut *const Handle,
        edges: *mut *const c_void, count: *mut usize,
    ) {
        ready()?.cuStreamGetCaptureInfo_v3(stream.0, status, id, graph, nodes, edges, count)
    }
    fn cudaThreadExchangeStreamCaptureMode(mode: *mut c_int) { ready()?.cuThreadExchangeStreamCaptureMode(mode) }

    fn cudaGraphCreate(graph: *mut Handle, flags: c_uint) { ready()?.cuGraphCreate(graph, flags) }
    fn cudaGraphClone(clone: *mut Handle, graph: Handle) { ready()?.cuGraphClone(clone, graph) }
    fn cudaGraphAddKernelNode(
        node: *mut Handle, graph: Handle, after: *const Handle, count: usize, parameters: *const KernelNode,
    ) {
        let parameters = get(parameters)?.for_driver()?;
        ready()?.cuGraphAddKernelNode_v2(node, graph, after, count, ptr::from_ref(&parameters).cast())
    }
    fn cudaGraphAddMemcpyNode(
        node: *mut Handle, graph: Handle, after: *const Handle, count: usize, parameters: *const Copy3dParameters,
    ) {
        let copy = Copy3d::new(&get(parameters)?)?;
        ready()?.cuGraphAddMemcpyNode(node, graph, after, count, ptr::from_ref(&copy).cast(), 0)
    }
    fn cudaGraphAddMemcpyNode1D(
        node: *mut Handle, graph: Handle, after: *const Handle, count: usize, to: u64, from: u64, bytes: usize, _kind: c_int,
    ) {
        let copy = Copy3d::linear(to, from, bytes);
        ready()?.cuGraphAddMemcpyNode(node, graph, after, count, ptr::from_ref(&copy).cast(), 0)
    }
    // `cudaMemsetParams` and `cudaHostNodeParams` have the same fields as the driver's types.
    fn cudaGraphAddMemsetNode(
        node: *mut Handle, graph: Handle, after: *const Handle, count: usize, parameters: *const c_void,
    ) {
        ready()?.cuGraphAddMemsetNode(node, graph, after, count, parameters, 0)
    }
    fn cudaGraphAddHostNode(
        node: *mut Handle, graph: Handle, after: *const Handle, count: usize, parameters: *const c_void,
    ) {
        ready()?.cuGraphAddHostNode(node, graph, after, count, parameters)
    }
    fn cudaGraphAddChildGraphNode(
        node: *mut Handle, graph: Handle, after: *const Handle, count: usize, child: Handle,
    ) {
        ready()?.cuGraphAddChildGraphNode(node, graph, after, count, child)
    }
    fn cudaGraphAddEmptyNode(node: *mut Handle, graph: Handle, after: *const Handle, count: usize) {
        ready()?.cuGraphAddEmptyNode(node, graph, after, count)
    }
    fn cudaGraphKernelNodeSetParams(node: Handle, parameters: *const KernelNode) {
        let parameters = get(parameters)?.for_driver()?;
        ready()?.cuGraphKernelNodeSetParams_v2(node, ptr::from_ref(&parameters).cast())
    }
    fn cudaGraphExecKernelNodeSetParams(executable: Handle, node: Handle, parameters: *const KernelNode) {
        let parameters = get(parameters)?.for_driver()?;
        ready()?.cuGraphExecKernelNodeSetParams_v2(executable, node, ptr::from_ref(&parameters).cast())
    }
    fn cudaGraphGetNodes(graph: Handle, nodes: *mut Handle, count: *mut usize) {
        ready()?.cuGraphGetNodes(graph, nodes, count)
    }
    fn cudaGraphGetRootNodes(graph: Handle, nodes: *mut Handle, count: *mut usize) {
        ready()?.cuGraphGetRootNodes(graph, nodes, count)
    }
    fn cudaGraphNodeGetType(node: Handle, kind: *mut c_int) { ready()?.cuGraphNodeGetType(node, kind) }
    fn cudaGraphInstantiate(executable: *mut Handle, graph: Handle, flags: c_ulonglong) {
        ready()?.cuGraphInstantiateWithFlags(executable, graph, flags)
    }
    fn cudaGraphInstantiateWithFlags(executable: *mut Handle, graph: Handle, flags: c_ulonglong) {
        ready()?.cuGraphInstantiateWithFlags(executable, graph, flags)
    }
    fn cudaGraphExecUpdate(executable: Handle, graph: Handle, result: *mut c_void) {
        ready()?.cuGraphExecUpdate_v2(executable, graph, result)
    }
    fn cudaGraphUpload, cudaGraphUpload_ptsz(executable: Handle, stream: Stream) {
        ready()?.cuGraphUpload(executable, stream.0)
    }
    fn cudaGraphLaunch, cudaGraphLaunch_ptsz(executable: Handle, stream: Stream) {
        ready()?.cuGraphLaunch(executable, stream.0)
    }
    fn cudaGraphExecDestroy(executable: Handle) { ready()?.cuGraphExecDestroy(executable) }
    fn cudaGraphDestroy(graph: Handle) { ready()?.cuGraphDestroy(graph) }
    fn cudaGraphExecGetFlags(executable: Handle, flags: *mut c_ulonglong) {
        if executable == 0 { return Err(INVALID_VALUE); }
        put(flags, 0)
    }
}
