//! Contexts: the primary context, and contexts that a program creates. All share the GPU's memory.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

use crate::call::{Needs, enter, functions, put};
use crate::code::{INVALID_CONTEXT, INVALID_DEVICE, INVALID_VALUE, NOT_INITIALIZED, UNSUPPORTED_LIMIT};
use crate::current::{change, current};
use crate::handle::Handle;
use crate::objects::Context;
use crate::state::{Driver, driver};

/// Handle of the primary context.
pub const PRIMARY: Handle = 0xC0;

impl Driver {
    pub fn check_card(&self, device: c_int) -> Result<(), crate::code::Code> {
        if (0..self.cards).contains(&device) { Ok(()) } else { Err(INVALID_DEVICE) }
    }

    fn check_context(&self, context: Handle) -> Result<(), crate::code::Code> {
        if self.contexts.contains_key(&context) { Ok(()) } else { Err(INVALID_CONTEXT) }
    }

    fn create_context(&mut self, flags: c_uint) -> Handle {
        let handle = self.handle();
        self.contexts.insert(handle, Context { users: 1, flags });
        change(|stack| stack.push(handle));
        handle
    }
}

/// Values of the `CUlimit` numbers (cuda.h) on an H200.
const LIMITS: [usize; 8] = [1024, 8_650_752, 8 << 20, 0, 2048, 64, 11_796_480, 232_448];

functions! {
    fn cuDevicePrimaryCtxRetain(context: *mut Handle, device: c_int) {
        let mut driver = enter(NAME, Needs::Init)?;
        driver.check_card(device)?;
        put(context, PRIMARY)?;
        driver.contexts.entry(PRIMARY).or_default().users += 1;
        Ok(())
    }
    fn cuDevicePrimaryCtxRelease_v2(device: c_int) {
        let mut driver = enter(NAME, Needs::Init)?;
        driver.check_card(device)?;
        let primary = driver.contexts.get_mut(&PRIMARY).ok_or(INVALID_CONTEXT)?;
        primary.users = primary.users.checked_sub(1).ok_or(INVALID_CONTEXT)?;
        Ok(())
    }
    fn cuDevicePrimaryCtxReset_v2(device: c_int) {
        enter(NAME, Needs::Init)?.check_card(device)?;
        let _ = crate::run::everything();
        let mut driver = driver();
        driver.lost = None;
        driver.queue.clear();
        driver.memory.free_all();
        Ok(())
    }
    fn cuDevicePrimaryCtxSetFlags_v2(device: c_int, flags: c_uint) {
        let mut driver = enter(NAME, Needs::Init)?;
        driver.check_card(device)?;
        driver.contexts.entry(PRIMARY).or_default().flags = flags;
        Ok(())
    }
    fn cuDevicePrimaryCtxGetState(device: c_int, flags: *mut c_uint, active: *mut c_int) {
        let driver = enter(NAME, Needs::Init)?;
        driver.check_card(device)?;
        let primary = driver.contexts.get(&PRIMARY);
        put(flags, primary.map_or(0, |primary| primary.flags))?;
        put(active, primary.is_some_and(|primary| primary.users > 0).into())
    }
    fn cuCtxCreate_v2(context: *mut Handle, flags: c_uint, device: c_int) {
        let mut driver = enter(NAME, Needs::Init)?;
        driver.check_card(device)?;
        if context.is_null() { return Err(INVALID_VALUE); }
        put(context, driver.create_context(flags))
    }
    fn cuCtxCreate_v4(context: *mut Handle, _parameters: *const c_void, flags: c_uint, device: c_int) {
        let mut driver = enter(NAME, Needs::Init)?;
        driver.check_card(device)?;
        if context.is_null() { return Err(INVALID_VALUE); }
        put(context, driver.create_context(flags))
    }
    fn cuCtxDestroy_v2(context: Handle) {
        let mut driver = enter(NAME, Needs::Init)?;
        driver.check_context(context)?;
        if context == PRIMARY { return Err(INVALID_CONTEXT); }
        driver.contexts.remove(&context);
        change(|stack| stack.pop_if(|top| *top == context));
        Ok(())
    }
    fn cuCtxPushCurrent_v2(context: Handle) {
        enter(NAME, Needs::Init)?.check_context(context)?;
        change(|stack| stack.push(context)).ok_or(NOT_INITIALIZED)
    }
    fn cuCtxPopCurrent_v2(context: *mut Handle) {
        let _driver = enter(NAME, Needs::Init)?;
        let top = change(Vec::pop).flatten().ok_or(INVALID_CONTEXT)?;
        if context.is_null() { Ok(()) } else { put(context, top) }
    }
    fn cuCtxSetCurrent(context: Handle) {
        let driver = enter(NAME, Needs::Init)?;
        if context != 0 { driver.check_context(context)?; }
        change(|stack| {
            stack.pop();
            if context != 0 { stack.push(context); }
        });
        Ok(())
    }
    fn cuCtxGetCurrent(context: *mut Handle) {
        let _driver = enter(NAME, Needs::Init)?;
        put(context, current())
    }
    fn cuCtxGetDevice(device: *mut c_int) {
        let _driver = enter(NAME, Needs::Init)?;
        if current() == 0 { return Err(INVALID_CONTEXT); }
        put(device, 0)
    }
    fn cuCtxGetDevice_v2(device: *mut c_int, context: Handle) {
        let driver = enter(NAME, Needs::Init)?;
        driver.check_context(if context == 0 { current() } else { context })?;
        put(device, 0)
    }
    fn cuCtxGetFlags(flags: *mut c_uint) {
        let driver = enter(NAME, Needs::Context)?;
        put(flags, driver.contexts.get(&current()).map_or(0, |context| context.flags))
    }
    fn cuCtxSetFlags(flags: c_uint) {
        let mut driver = enter(NAME, Needs::Context)?;
        driver.contexts.entry(current()).or_default().flags = flags;
        Ok(())
    }
    fn cuCtxGetId(context: Handle, id: *mut c_ulonglong) {
        let driver = enter(NAME, Needs::Init)?;
        let context = if context == 0 { current() } else { context };
        driver.check_context(context)?;
        put(id, context as c_ulonglong)
    }
    fn cuCtxGetApiVersion(context: Handle, version: *mut c_uint) {
        let driver = enter(NAME, Needs::Init)?;
        driver.check_context(if context == 0 { current() } else { context })?;
        put(version, 3020)
    }
    fn cuCtxSynchronize() {
        enter(NAME, Needs::Context)?.queue.check_nothing_captured()?;
        crate::run::everything()
    }
    fn cuCtxSynchronize_v2(context: Handle) {
        let driver = enter(NAME, Needs::Context)?;
        driver.check_context(if context == 0 { current() } else { context })?;
        driver.queue.check_nothing_captured()?;
        drop(driver);
        crate::run::everything()
    }
    fn cuCtxGetLimit(value: *mut usize, limit: c_uint) {
        let _driver = enter(NAME, Needs::Context)?;
        put(value, *LIMITS.get(limit as usize).ok_or(UNSUPPORTED_LIMIT)?)
    }
    // Limits determine how much memory a GPU reserves. The emulator reserves nothing.
    fn cuCtxSetLimit(limit: c_uint, _value: usize) {
        let _driver = enter(NAME, Needs::Context)?;
        LIMITS.get(limit as usize).map(|_| ()).ok_or(UNSUPPORTED_LIMIT)
    }
    fn cuCtxGetCacheConfig(config: *mut c_uint) {
        let _driver = enter(NAME, Needs::Context)?;
        put(config, 0)
    }
    fn cuCtxSetCacheConfig(_config: c_uint) { enter(NAME, Needs::Context).map(drop) }
    fn cuCtxGetSharedMemConfig(config: *mut c_uint) {
        let _driver = enter(NAME, Needs::Context)?;
        put(config, 1)
    }
    fn cuCtxSetSharedMemConfig(_config: c_uint) { enter(NAME, Needs::Context).map(drop) }
    fn cuCtxResetPersistingL2Cache() { enter(NAME, Needs::Context).map(drop) }
    fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) {
        let _driver = enter(NAME, Needs::Context)?;
        if !least.is_null() { put(least, 0)?; }
        if !greatest.is_null() { put(greatest, -5)?; }
        Ok(())
    }
}
