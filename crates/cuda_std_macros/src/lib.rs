//! The `#[kernel]` attribute. `cuda_std` re-exports and documents it.
//!
//! The macro checks a kernel's signature and ignores its body.

use proc_macro::TokenStream;
use quote::{format_ident, quote};
use syn::{
    Error, Expr, FnArg, Ident, ItemFn, ReturnType, Token,
    parse::{Parse, ParseStream},
    parse_macro_input,
    punctuated::Punctuated,
    spanned::Spanned,
};

/// Turns a function into a kernel entry; see `cuda_std::kernel`.
#[proc_macro_attribute]
pub fn kernel(arguments: TokenStream, item: TokenStream) -> TokenStream {
    let bounds = parse_macro_input!(arguments as Bounds);
    let function = parse_macro_input!(item as ItemFn);
    expand(bounds, function).unwrap_or_else(Error::into_compile_error).into()
}

fn expand(bounds: Bounds, function: ItemFn) -> syn::Result<proc_macro2::TokenStream> {
    check(&function)?;
    let ItemFn { attrs, vis, sig, block } = function;
    let syn::Signature { ident, inputs, .. } = sig;
    let types = inputs.iter().map(|input| match input {
        FnArg::Typed(input) => Ok(&input.ty),
        FnArg::Receiver(receiver) => {
            Err(Error::new(receiver.span(), "a kernel must be a free function, without `self`"))
        }
    });
    let types = types.collect::<syn::Result<Vec<_>>>()?;

    // cuda_builder reads this static, turns it into attributes of the kernel, and removes it.
    let bounds_name = format!("__launch_bounds_{ident}");
    let bounds_static = format_ident!("{}", bounds_name.to_uppercase());
    let Bounds { threads, min_blocks, cluster } = bounds;

    Ok(quote! {
        const _: () = {
            const fn kernel_parameters_are_copy<T: Copy>() {}
            #(kernel_parameters_are_copy::<#types>();)*
        };

        #[cfg_attr(target_arch = "nvptx64", unsafe(export_name = #bounds_name))]
        #[cfg_attr(not(target_arch = "nvptx64"), allow(dead_code))]
        static #bounds_static: [u32; 3] = [#threads, #min_blocks, #cluster];

        #[cfg(target_arch = "nvptx64")]
        #(#attrs)*
        #[unsafe(no_mangle)]
        #vis unsafe extern "ptx-kernel" fn #ident(#inputs) #block

        #[cfg(not(target_arch = "nvptx64"))]
        #(#attrs)*
        #[allow(dead_code)]
        #vis unsafe fn #ident(#inputs) #block
    })
}

/// Checks that the hardware can launch the function: free, unsafe, not generic, without a return value.
fn check(function: &ItemFn) -> syn::Result<()> {
    let sig = &function.sig;
    let refuse = |span: &dyn Spanned, message| Err(Error::new(span.span(), message));
    if sig.unsafety.is_none() {
        return refuse(
            &sig.fn_token,
            "a kernel must be an `unsafe fn`, because its arguments are not checked at the launch",
        );
    }
    if let Some(constness) = &sig.constness {
        return refuse(constness, "a kernel cannot be `const`");
    }
    if let Some(asyncness) = &sig.asyncness {
        return refuse(asyncness, "a kernel cannot be `async`");
    }
    if let Some(abi) = &sig.abi {
        return refuse(abi, "`#[kernel]` sets the ABI; remove `extern`");
    }
    if !sig.generics.params.is_empty() {
        return refuse(&sig.generics, "a kernel cannot be generic, because its exported name must be unique");
    }
    if let ReturnType::Type(_, ty) = &sig.output {
        return refuse(ty, "a kernel cannot return a value; write the result through a parameter");
    }
    Ok(())
}

/// Launch bounds `threads = …, min_blocks = …, cluster = …`. 0: no bound.
struct Bounds {
    threads: Expr,
    min_blocks: Expr,
    cluster: Expr,
}

impl Parse for Bounds {
    fn parse(input: ParseStream) -> syn::Result<Self> {
        let zero = || syn::parse_quote!(0);
        let mut bounds = Self { threads: zero(), min_blocks: zero(), cluster: zero() };
        for argument in Punctuated::<Argument, Token![,]>::parse_terminated(input)? {
            match argument.name.to_string().as_str() {
                "threads" => bounds.threads = argument.value,
                "min_blocks" => bounds.min_blocks = argument.value,
                "cluster" => bounds.cluster = argument.value,
                _ => {
                    let expected = "expected `threads`, `min_blocks` or `cluster`";
                    return Err(Error::new(argument.name.span(), expected));
                }
            }
        }
        Ok(bounds)
    }
}

struct Argument {
    name: Ident,
    value: Expr,
}

impl Parse for Argument {
    fn parse(input: ParseStream) -> syn::Result<Self> {
        let name = input.parse()?;
        input.parse::<Token![=]>()?;
        Ok(Self { name, value: input.parse()? })
    }
}
