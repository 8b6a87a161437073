//! The context stack of each thread.

use std::cell::RefCell;

use crate::handle::Handle;

thread_local! {
    /// The thread's contexts. The last one is current.
    static STACK: RefCell<Vec<Handle>> = const { RefCell::new(Vec::new()) };
}

/// Returns the thread's current context. 0: there is none.
pub fn current() -> Handle {
    STACK.try_with(|stack| stack.borrow().last().copied()).ok().flatten().unwrap_or(0)
}

/// Changes the thread's contexts. `None`: the thread is ending.
pub fn change<T>(change: impl FnOnce(&mut Vec<Handle>) -> T) -> Option<T> {
    STACK.try_with(|stack| change(&mut stack.borrow_mut())).ok()
}

/// Clears the thread's contexts.
pub fn forget() {
    change(Vec::clear);
}
