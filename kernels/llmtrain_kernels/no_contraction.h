// No contraction to fused multiply-add: products and sums round separately, as in the references. Include this before
// any function.
#pragma once
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif
