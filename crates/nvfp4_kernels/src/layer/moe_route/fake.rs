//! The kernel's implementation for the fake driver.

use fake_cuda::Launch;
use kernels_gpu::layer::moe_route::abi::{
    COMBINE_ENTRIES, Combine, EXPAND_ENTRY, Expand, ExpandedRows, ROUTE_ENTRIES, Route,
};
use kernels_gpu::lists::{Lists, NO_ROW, token_tiles};
use kernels_gpu::sorted::{bits16_bytes, bits16_place};

use crate::fake::{out_dtype, slice, slice_mut};
use crate::layer::moe_pack::row_order::columns_of_k;
use nvfp4_core::moe::Rows;
use nvfp4_core::problem::TokenDtype;

/// Computes the launched entry by the kernel's contract.
pub(super) fn launch(launch: &Launch<'_>) {
    // SAFETY: tests launch this with a parameter whose addresses refer to live operands of the described sizes, which
    // only this launch accesses.
    unsafe {
        if ROUTE_ENTRIES.contains(&launch.kernel) {
            assert_eq!(launch.block, [Route::THREADS, 1, 1]);
            route(&launch.parameter(0));
        } else if launch.kernel == EXPAND_ENTRY {
            assert_eq!(launch.block, [Expand::THREADS, 1, 1]);
            expand(&launch.parameter(0));
        } else {
            assert_eq!(launch.block, [Combine::THREADS, 1, 1]);
            let dtype = if launch.kernel == COMBINE_ENTRIES[0] { TokenDtype::F16 } else { TokenDtype::Bf16 };
            combine(&launch.parameter(0), dtype);
        }
    }
}

/// Writes the lists, and the tokens in the order of K.
///
/// # Safety
///
/// The addresses in `route` refer to live operands of the described sizes, which nobody else accesses.
unsafe fn route(route: &Route) {
    let (tokens, top_k, hidden) = (route.token_count as usize, route.top_k as usize, route.hidden);
    // SAFETY: the caller guarantees that every address in `route` refers to a live operand of the described size, which
    // nobody else accesses.
    unsafe {
        let map: Option<&[i32]> = (route.map != 0).then(|| slice(route.map, route.named_experts as usize));
        let ids = slice(route.ids, tokens * top_k);
        let rows = Rows::new(ids, top_k, route.experts as usize, map);
        write_lists(route.lists, &rows, route.experts, route.tile_tokens, route.row_multiple);
        if route.shared_lists != 0 {
            let rows = Rows::new(&vec![0; tokens], 1, 1, None);
            write_lists(route.shared_lists, &rows, 1, route.shared_tile_tokens, route.row_multiple);
        }
        if route.tokens == 0 {
            return;
        }
        let (dtype, order) = (out_dtype(route.operand_type), columns_of_k(hidden));
        for token in 0..tokens {
            let from: &[u16] = slice(route.input + token as u64 * route.input_pitch, hidden as usize);
            let to: &mut [u16] = slice_mut(route.tokens + 2 * u64::from(hidden) * token as u64, hidden as usize);
            let weight = (route.input_weights != 0).then(|| slice::<f32>(route.input_weights, tokens)[token]);
            let has_plain = weight.is_some() && route.shared_tokens != 0;
            let plain = has_plain
                .then(|| slice_mut::<u16>(route.shared_tokens + 2 * u64::from(hidden) * token as u64, hidden as usize));
            let plain = plain.unwrap_or_default();
            for (place, &column) in order.iter().enumerate() {
                let element = from[column];
                if let Some(plain) = plain.get_mut(place) {
                    *plain = element;
                }
                let weighted = weight.map(|weight| dtype.round_f32(dtype.decode(element) as f32 * weight));
                to[place] = weighted.unwrap_or(element);
            }
        }
    }
}

/// Copies tokens to their rows.
///
/// # Safety
///
/// The addresses in `expand` refer to live operands of the described sizes, which nobody else accesses.
unsafe fn expand(expand: &Expand) {
    let (hidden, top_k, dtype) = (expand.hidden, expand.top_k as usize, out_dtype(expand.operand_type));
    let order = columns_of_k(hidden);
    // SAFETY: the caller guarantees that every address in `expand` refers to a live operand of the described size,
    // which nobody else accesses.
    unsafe {
        let write = |to: &ExpandedRows, row: u32, token: &[u16]| {
            let at = slice_mut(to.tokens, bits16_bytes(to.capacity.into(), hidden) as usize / 2);
            for (position, &element) in (0..).zip(&order) {
                at[bits16_place(to.capacity, hidden, row, position) as usize / 2] = token[element];
            }
        };
        for index in 0..expand.token_count as usize {
            let token: &[u16] = slice(expand.input + index as u64 * expand.input_pitch, hidden as usize);
            if expand.shared.tokens != 0 {
                write(&expand.shared, index as u32, token);
            }
            if expand.routed.tokens == 0 {
                continue;
            }
            let weighted = |&bits: &u16| match expand.input_weights {
                0 => bits,
                at => dtype.round_f32(dtype.decode(bits) as f32 * *(at as *const f32).add(index)),
            };
            let token: Vec<u16> = token.iter().map(weighted).collect();
            let places: &[u32] = slice(expand.places + 4 * (index * top_k) as u64, top_k);
            places.iter().filter(|row| **row != NO_ROW).for_each(|&row| write(&expand.routed, row, &token));
        }
    }
}

/// Writes the lists of `rows` to `at`.
///
/// # Safety
///
/// `at` is valid for writes of [`Lists`] for these choices and experts, and nobody else accesses them.
unsafe fn write_lists(at: u64, rows: &Rows, experts: u32, tile_tokens: u32, row_multiple: u32) {
    let lists = Lists::filled(rows.places().len() as u64, experts, row_multiple);
    let (mut firsts, mut tile_firsts, mut tokens) = (vec![0], vec![0], Vec::new());
    let mut places = rows.places().to_vec();
    for ends in rows.firsts().windows(2) {
        let (first, count) = (tokens.len() as u32, ends[1] - ends[0]);
        let moved = rows.places().iter().zip(&mut places).filter(|(place, _)| (ends[0]..ends[1]).contains(place));
        moved.for_each(|(place, to)| *to = first + place - ends[0]);
        tokens.extend(&rows.tokens()[ends[0] as usize..ends[1] as usize]);
        tokens.resize((first + count.next_multiple_of(row_multiple)) as usize, NO_ROW);
        firsts.push(tokens.len() as u32);
        tile_firsts.push(tile_firsts[tile_firsts.len() - 1] + token_tiles(tokens.len() as u32 - first, tile_tokens));
    }
    // SAFETY: the caller guarantees that all lists of `lists` are writable at `at` and that nobody else accesses them.
    unsafe {
        slice_mut::<u32>(at + lists.tickets, Lists::TICKETS as usize).fill(0);
        for (offset, list) in
            [(lists.firsts, &firsts), (lists.tile_firsts, &tile_firsts), (lists.rows, &tokens), (lists.places, &places)]
        {
            slice_mut(at + offset, list.len()).copy_from_slice(list);
        }
    }
}

/// Writes the weighted sum of every token's rows.
///
/// # Safety
///
/// The addresses in `combine` refer to live operands of the described sizes, which nobody else accesses.
unsafe fn combine(combine: &Combine, dtype: TokenDtype) {
    let (hidden, top_k) = (combine.hidden as usize, combine.top_k as usize);
    for token in 0..combine.token_count as usize {
        // SAFETY: the caller guarantees that every address in `combine` refers to a live operand of the described size,
        // which nobody else accesses.
        unsafe {
            let row = |rows: u64, row: u32| slice::<u16>(rows + 2 * hidden as u64 * u64::from(row), hidden);
            let weight =
                |weights: u64, index: usize| if weights == 0 { 1.0 } else { *(weights as *const f32).add(index) };
            let places: &[u32] = slice(combine.places + 4 * (token * top_k) as u64, top_k);
            let mut terms: Vec<(f32, &[u16])> = Vec::new();
            for (j, &place) in places.iter().enumerate().filter(|(_, place)| **place != NO_ROW) {
                terms.push((weight(combine.weights, token * top_k + j), row(combine.rows, place)));
            }
            if combine.shared_rows != 0 {
                terms.push((weight(combine.shared_weights, token), row(combine.shared_rows, token as u32)));
            }
            let output: &mut [u16] = slice_mut(combine.output + token as u64 * combine.output_pitch, hidden);
            for (column, output) in output.iter_mut().enumerate() {
                let sum =
                    terms.iter().fold(0.0, |sum, (weight, row)| weight.mul_add(dtype.decode(row[column]) as f32, sum));
                *output = dtype.round_f32(sum);
            }
        }
    }
}
