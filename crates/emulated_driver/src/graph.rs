//! Graphs, captured from streams or built from nodes, and executable graphs.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::sync::Arc;

use crate::call::{Needs, array, enter, functions, get, put};
use crate::code::{Code, GRAPH_EXEC_UPDATE_FAILURE, INVALID_HANDLE, INVALID_VALUE, NOT_SUPPORTED};
use crate::copy::Copy3d;
use crate::handle::Handle;
use crate::launch::Shape;
use crate::objects::{Graph, Node};
use crate::state::Driver;
use crate::work::{Fill, HostFunction, Operation, Work};

/// `CUDA_KERNEL_NODE_PARAMS` (cuda.h) in its second version, which adds two handles.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct KernelNode {
    function: Handle,
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    parameters: *const *const c_void,
    extra: *const *const c_void,
    kernel: Handle,
    _context: Handle,
}

/// `CUDA_MEMSET_NODE_PARAMS` (cuda.h).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MemsetNode {
    to: u64,
    pitch: usize,
    value: c_uint,
    element: c_uint,
    width: usize,
    height: usize,
}

/// `CUDA_HOST_NODE_PARAMS` (cuda.h).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct HostNode {
    function: usize,
    data: usize,
}

impl Driver {
    fn graph(&self, graph: Handle, executable: bool) -> Result<&Graph, Code> {
        self.graphs.get(&graph).filter(|graph| graph.executable == executable).ok_or(INVALID_HANDLE)
    }

    fn remove_graph(&mut self, graph: Handle, executable: bool) -> Result<(), Code> {
        self.graph(graph, executable)?;
        self.graphs.remove(&graph);
        self.nodes.retain(|_, node| node.graph != graph);
        Ok(())
    }

    /// Returns the indices of nodes of a graph.
    ///
    /// # Safety
    ///
    /// `nodes` is null or valid for reads of `count` handles.
    unsafe fn indices(&self, graph: Handle, nodes: *const Handle, count: usize) -> Result<Vec<usize>, Code> {
        let index = |node: &Handle| {
            let node = self.nodes.get(node).filter(|node| node.graph == graph)?;
            Some(node.index)
        };
        // SAFETY: the caller guarantees that `nodes` is null or has `count` handles.
        unsafe { array(nodes, count)? }.iter().map(|node| index(node).ok_or(INVALID_VALUE)).collect()
    }

    fn add_node(&mut self, graph: Handle, work: Work, after: Vec<usize>) -> Result<Handle, Code> {
        let known = self.graphs.get_mut(&graph).filter(|graph| !graph.executable).ok_or(INVALID_HANDLE)?;
        let operations = Arc::make_mut(&mut known.operations);
        operations.push(Operation { work, after });
        let index = operations.len() - 1;
        let handle = self.handle();
        self.nodes.insert(handle, Node { graph, index });
        Ok(handle)
    }

    /// Replaces the work of a node of a graph, or of an executable graph made from it, by other work of the same kind.
    fn set_node(&mut self, executable: Option<Handle>, node: Handle, work: Work) -> Result<(), Code> {
        let Node { graph, index } = *self.nodes.get(&node).ok_or(INVALID_HANDLE)?;
        self.graph(executable.unwrap_or(graph), executable.is_some())?;
        let graph = self.graphs.get_mut(&executable.unwrap_or(graph)).ok_or(INVALID_HANDLE)?;
        let operation = Arc::make_mut(&mut graph.operations).get_mut(index).ok_or(INVALID_VALUE)?;
        if std::mem::discriminant(&operation.work) != std::mem::discriminant(&work) {
            return Err(INVALID_VALUE);
        }
        operation.work = work;
        Ok(())
    }

    /// Returns the nodes of a graph in the order of its operations. A captured operation gets a node handle here.
    fn nodes_of(&mut self, graph: Handle) -> Result<Vec<Handle>, Code> {
        let count = self.graph(graph, false)?.operations.len();
        let mut handles = Vec::new();
        for index in 0..count {
            let known = self.nodes.iter().find(|(_, node)| node.graph == graph && node.index == index);
            let known = known.map(|(handle, _)| *handle);
            let handle = known.unwrap_or_else(|| {
                let handle = self.handle();
                self.nodes.insert(handle, Node { graph, index });
                handle
            });
            handles.push(handle);
        }
        Ok(handles)
    }

    /// Returns the launch that a kernel node's parameters describe.
    ///
    /// # Safety
    ///
    /// `parameters` is null or valid as cuda.h requires.
    unsafe fn kernel_work(&self, parameters: *const KernelNode) -> Result<Work, Code> {
        // SAFETY: the caller guarantees that `parameters` is null or valid for reads.
        let node = unsafe { get(parameters)? };
        let function = if node.function == 0 { node.kernel } else { node.function };
        let shape = Shape::plain(node.grid, node.block, node.shared_bytes, 0);
        // SAFETY: the caller guarantees that the node's parameters are valid as cuda.h requires.
        unsafe { self.prepare(function, &shape, node.parameters, node.extra) }
    }

    fn copy_work(&self, description: &Copy3d) -> Result<Work, Code> {
        let mut copy = self.copy_3d(description)?;
        copy.check(&self.memory)?;
        Ok(Work::Copy(Arc::new(copy)))
    }

    fn fill_work(&self, node: &MemsetNode) -> Result<Work, Code> {
        let bytes = node.value.to_le_bytes();
        let value = match node.element {
            1 | 2 | 4 => bytes[..node.element as usize].to_vec(),
            _ => return Err(INVALID_VALUE),
        };
        let MemsetNode { width, pitch, .. } = *node;
        let mut fill = Fill { to: self.end(node.to), value, width, rows: node.height.max(1), pitch };
        fill.check(&self.memory)?;
        Ok(Work::Fill(Arc::new(fill)))
    }

    fn instantiate(&mut self, graph: Handle) -> Result<Handle, Code> {
        let operations = self.graph(graph, false)?.operations.clone();
        Ok(self.add_graph(Graph { operations, executable: true }))
    }

    /// Replaces the work of an executable graph by the work of a graph of the same form.
    fn update(&mut self, executable: Handle, graph: Handle) -> Result<(), Code> {
        let new = self.graph(graph, false)?.operations.clone();
        let old = &self.graph(executable, true)?.operations;
        let kind = std::mem::discriminant::<Work>;
        let same = |(a, b): (&Operation, &Operation)| kind(&a.work) == kind(&b.work) && a.after == b.after;
        if old.len() != new.len() || !old.iter().zip(new.iter()).all(same) {
            return Err(GRAPH_EXEC_UPDATE_FAILURE);
        }
        self.graphs.insert(executable, Graph { operations: new, executable: true });
        Ok(())
    }
}

/// `CUgraphNodeType` (cuda.h).
fn kind(work: &Work) -> c_int {
    match work {
        Work::Launch(_) => 0,
        Work::Copy(_) => 1,
        Work::Fill(_) => 2,
        Work::Host(_) => 3,
        Work::Graph(_) => 4,
        Work::Join => 5,
        Work::Pass(_) => 7,
        Work::Free(_) => 11,
    }
}

/// Copies a list of nodes to the caller's array, or stores its length if `nodes` is null.
///
/// # Safety
///
/// `count` is null or valid for reads and writes. `nodes` is null or has room for `*count` handles.
unsafe fn list(handles: &[Handle], nodes: *mut Handle, count: *mut usize) -> Result<(), Code> {
    // SAFETY: the caller guarantees that `count` is valid and that `nodes` has room for `*count` handles.
    unsafe {
        if nodes.is_null() {
            return put(count, handles.len());
        }
        let room = get(count)?.min(handles.len());
        for (at, handle) in handles.iter().take(room).enumerate() {
            put(nodes.add(at), *handle)?;
        }
        put(count, room)
    }
}

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const RELAXED: c_int = 2;

functions! {
    fn cuStreamBeginCapture_v2(stream: Handle, mode: c_int) {
        let mut driver = enter(NAME, Needs::Context)?;
        let id = driver.handle() as u64;
        driver.queue.begin_capture(stream, mode == RELAXED, id)
    }
    fn cuStreamEndCapture(stream: Handle, graph: *mut Handle) {
        let mut driver = enter(NAME, Needs::Context)?;
        put(graph, 0)?;
        let operations = Arc::new(driver.queue.end_capture(stream)?);
        put(graph, driver.add_graph(Graph { operations, executable: false }))
    }
    fn cuStreamIsCapturing(stream: Handle, status: *mut c_int) {
        let capture = enter(NAME, Needs::Context)?.queue.capture_of(stream)?;
        put(status, capture.is_some().into())
    }
    fn cuStreamGetCaptureInfo_v2(
        stream: Handle, status: *mut c_int, id: *mut u64, graph: *mut Handle, nodes: *mut *const Handle, count: *mut usize,
    ) {
        let capture = enter(NAME, Needs::Context)?.queue.capture_of(stream)?;
        put(status, capture.is_some().into())?;
        if !id.is_null() { put(id, capture.unwrap_or(0))?; }
        if !graph.is_null() { put(graph, 0)?; }
        if !nodes.is_null() { put(nodes, std::ptr::null())?; }
        if count.is_null() { Ok(()) } else { put(count, 0) }
    }
    fn cuStreamGetCaptureInfo_v3(
        stream: Handle, status: *mut c_int, id: *mut u64, graph: *mut Handle, nodes: *mut *const Handle,
        edges: *mut *const c_void, count: *mut usize,
    ) {
        let capture = enter(NAME, Needs::Context)?.queue.capture_of(stream)?;
        put(status, capture.is_some().into())?;
        if !id.is_null() { put(id, capture.unwrap_or(0))?; }
        if !graph.is_null() { put(graph, 0)?; }
        if !nodes.is_null() { put(nodes, std::ptr::null())?; }
        if !edges.is_null() { put(edges, std::ptr::null())?; }
        if count.is_null() { Ok(()) } else { put(count, 0) }
    }
    fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int) {
        let _driver = enter(NAME, Needs::Init)?;
        get(mode).map(drop)
    }

    fn cuGraphCreate(graph: *mut Handle, _flags: c_uint) {
        let mut driver = enter(NAME, Needs::Context)?;
        if graph.is_null() { return Err(INVALID_VALUE); }
        put(graph, driver.add_graph(Graph { operations: Arc::default(), executable: false }))
    }
    fn cuGraphClone(clone: *mut Handle, graph: Handle) {
        let mut driver = enter(NAME, Needs::Context)?;
        if clone.is_null() { return Err(INVALID_VALUE); }
        let operations = driver.graph(graph, false)?.operations.clone();
        put(clone, driver.add_graph(Graph { operations, executable: false }))
    }
    fn cuGraphAddKernelNode_v2(
        node: *mut Handle, graph: Handle, after: *const Handle, count: usize, parameters: *const KernelNode,
    ) {
        let mut driver = enter(NAME, Needs::Context)?;
        let after = driver.indices(graph, after, count)?;
        let work = driver.kernel_work(parameters)?;
        if node.is_null() { return Err(INVALID_VALUE); }
        put(node, driver.add_node(graph, work, after)?)
    }
    fn cuGraphAddMemcpyNode(
        node: *mut Handle, graph: Handle, after: *const Handle, count: usize, parameters: *const Copy3d, _context: Handle,
    ) {
        let mut driver = enter(NAME, Needs::Context)?;
        let after = driver.indices(graph, after, count)?;
        let work = driver.copy_work(&get(parameters)?)?;
        if node.is_null() { return Err(INVALID_VALUE); }
        put(node, driver.add_node(graph, work, after)?)
    }
    fn cuGraphAddMemsetNode(
        node: *mut Handle, graph: Handle, after: *const Handle, count: usize, parameters: *const MemsetNode,
        _context: Handle,
    ) {
        let mut driver = enter(NAME, Needs::Context)?;
        let after = driver.indices(graph, after, count)?;
        let work = driver.fill_work(&get(parameters)?)?;
        if node.is_null() { return Err(INVALID_VALUE); }
        put(node, driver.add_node(graph, work, after)?)
    }
    fn cuGraphAddHostNode(
        node: *mut Handle, graph: Handle, after: *const Handle, count: usize, parameters: *const HostNode,
    ) {
        let mut driver = enter(NAME, Needs::Context)?;
        let after = driver.indices(graph, after, count)?;
        let HostNode { function, data } = get(parameters)?;
        if node.is_null() || function == 0 { return Err(INVALID_VALUE); }
        let work = Work::Host(HostFunction { function, data, callback_of: None });
        put(node, driver.add_node(graph, work, after)?)
    }
    fn cuGraphAddChildGraphNode(
        node: *mut Handle, graph: Handle, after: *const Handle, count: usize, child: Handle,
    ) {
        let mut driver = enter(NAME, Needs::Context)?;
        let after = driver.indices(graph, after, count)?;
        let work = Work::Graph(driver.graph(child, false)?.operations.clone());
        if node.is_null() || child == graph { return Err(INVALID_VALUE); }
        put(node, driver.add_node(graph, work, after)?)
    }
    fn cuGraphAddEmptyNode(node: *mut Handle, graph: Handle, after: *const Handle, count: usize) {
        let mut driver = enter(NAME, Needs::Context)?;
        let after = driver.indices(graph, after, count)?;
        if node.is_null() { return Err(INVALID_VALUE); }
        put(node, driver.add_node(graph, Work::Join, after)?)
    }
    fn cuGraphAddDependencies(graph: Handle, from: *const Handle, to: *const Handle, count: usize) {
        let mut driver = enter(NAME, Needs::Context)?;
        let (from, to) = (driver.indices(graph, from, count)?, driver.indices(graph, to, count)?);
        // Nodes are numbered in the order of their addition. A backward edge could close a cycle.
        if from.iter().zip(&to).any(|(from, to)| from >= to) { return Err(NOT_SUPPORTED); }
        let graph = driver.graphs.get_mut(&graph).ok_or(INVALID_HANDLE)?;
        let operations = Arc::make_mut(&mut graph.operations);
        from.into_iter().zip(to).for_each(|(from, to)| operations[to].after.push(from));
        Ok(())
    }
    fn cuGraphKernelNodeSetParams_v2(node: Handle, parameters: *const KernelNode) {
        let mut driver = enter(NAME, Needs::Context)?;
        let work = driver.kernel_work(parameters)?;
        driver.set_node(None, node, work)
    }
    fn cuGraphMemcpyNodeSetParams(node: Handle, parameters: *const Copy3d) {
        let mut driver = enter(NAME, Needs::Context)?;
        let work = driver.copy_work(&get(parameters)?)?;
        driver.set_node(None, node, work)
    }
    fn cuGraphMemsetNodeSetParams(node: Handle, parameters: *const MemsetNode) {
        let mut driver = enter(NAME, Needs::Context)?;
        let work = driver.fill_work(&get(parameters)?)?;
        driver.set_node(None, node, work)
    }
    fn cuGraphExecKernelNodeSetParams_v2(executable: Handle, node: Handle, parameters: *const KernelNode) {
        let mut driver = enter(NAME, Needs::Context)?;
        let work = driver.kernel_work(parameters)?;
        driver.set_node(Some(executable), node, work)
    }
    fn cuGraphExecMemcpyNodeSetParams(executable: Handle, node: Handle, parameters: *const Copy3d, _context: Handle) {
        let mut driver = enter(NAME, Needs::Context)?;
        let work = driver.copy_work(&get(parameters)?)?;
        driver.set_node(Some(executable), node, work)
    }
    fn cuGraphExecMemsetNodeSetParams(executable: Handle, node: Handle, parameters: *const MemsetNode, _context: Handle) {
        let mut driver = enter(NAME, Needs::Context)?;
        let work = driver.fill_work(&get(parameters)?)?;
        driver.set_node(Some(executable), node, work)
    }
    fn cuGraphGetNodes(graph: Handle, nodes: *mut Handle, count: *mut usize) {
        let mut driver = enter(NAME, Needs::Context)?;
        let handles = driver.nodes_of(graph)?;
        list(&handles, nodes, count)
    }
    fn cuGraphGetRootNodes(graph: Handle, nodes: *mut Handle, count: *mut usize) {
        let mut driver = enter(NAME, Needs::Context)?;
        let handles = driver.nodes_of(graph)?;
        let operations = driver.graph(graph, false)?.operations.clone();
        let roots: Vec<_> =
            handles.into_iter().zip(operations.iter()).filter(|(_, op)| op.after.is_empty()).map(|(node, _)| node).collect();
        list(&roots, nodes, count)
    }
    fn cuGraphNodeGetType(node: Handle, type_: *mut c_int) {
        let driver = enter(NAME, Needs::Context)?;
        let Node { graph, index } = *driver.nodes.get(&node).ok_or(INVALID_HANDLE)?;
        let operations = &driver.graph(graph, false)?.operations;
        put(type_, kind(&operations.get(index).ok_or(INVALID_VALUE)?.work))
    }

    fn cuGraphInstantiateWithFlags(executable: *mut Handle, graph: Handle, _flags: c_ulonglong) {
        let mut driver = enter(NAME, Needs::Context)?;
        if executable.is_null() { return Err(INVALID_VALUE); }
        put(executable, driver.instantiate(graph)?)
    }
    fn cuGraphInstantiate_v2(
        executable: *mut Handle, graph: Handle, _node: *mut Handle, _log: *mut c_void, _bytes: usize,
    ) {
        let mut driver = enter(NAME, Needs::Context)?;
        if executable.is_null() { return Err(INVALID_VALUE); }
        put(executable, driver.instantiate(graph)?)
    }
    fn cuGraphInstantiateWithParams(executable: *mut Handle, graph: Handle, _parameters: *mut c_void) {
        let mut driver = enter(NAME, Needs::Context)?;
        if executable.is_null() { return Err(INVALID_VALUE); }
        put(executable, driver.instantiate(graph)?)
    }
    fn cuGraphExecUpdate_v2(executable: Handle, graph: Handle, result: *mut [usize; 3]) {
        let mut driver = enter(NAME, Needs::Context)?;
        let updated = driver.update(executable, graph);
        // CU_GRAPH_EXEC_UPDATE_SUCCESS, or CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED.
        if !result.is_null() { put(result, [if updated.is_ok() { 0 } else { 2 }, 0, 0])?; }
        updated
    }
    fn cuGraphUpload(executable: Handle, stream: Handle) {
        let mut driver = enter(NAME, Needs::Context)?;
        driver.queue.properties(stream)?;
        driver.graph(executable, true).map(drop)
    }
    fn cuGraphLaunch(executable: Handle, stream: Handle) {
        let mut driver = enter(NAME, Needs::Context)?;
        let operations = driver.graph(executable, true)?.operations.clone();
        driver.queue.push(stream, Work::Graph(operations))
    }
    fn cuGraphExecDestroy(executable: Handle) { enter(NAME, Needs::Context)?.remove_graph(executable, true) }
    fn cuGraphDestroy(graph: Handle) { enter(NAME, Needs::Context)?.remove_graph(graph, false) }
}
