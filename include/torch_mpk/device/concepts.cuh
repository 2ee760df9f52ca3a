// The parts of <type_traits> and <concepts> that device code needs. NVRTC has no standard library.
#pragma once

namespace mpk {

template <class A, class B>
inline constexpr bool kSame = false;
template <class A>
inline constexpr bool kSame<A, A> = true;

template <class A, class B>
concept Same = kSame<A, B>;

// Compile-time constants of one type: Constants<int, V::kBatch, V::kSize>.
template <class T, auto... values>
concept Constants = (kSame<const T, const decltype(values)> && ...);  // g++ 12 keeps the const of a member

template <bool first, class A, class B>
struct Choose {
  using Type = A;
};
template <class A, class B>
struct Choose<false, A, B> {
  using Type = B;
};

}  // namespace mpk
