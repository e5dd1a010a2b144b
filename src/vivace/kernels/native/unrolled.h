// Loops whose counter is a constant of an instruction or a template argument.
#pragma once

namespace {

// Calls use<0>() .. use<N - 1>().
template <int N, class Use>
inline __attribute__((always_inline)) void for_each_of(Use use) {
    if constexpr (N > 1) for_each_of<N - 1>(use);
    use.template operator()<N - 1>();
}

}  // namespace
