// What a standard library's <type_traits> and <concepts> would have, as far as it is needed: NVRTC has none.
#pragma once

namespace mpk {

template <class A, class B>
inline constexpr bool kSame = false;
template <class A>
inline constexpr bool kSame<A, A> = true;

template <class A, class B>
concept Same = kSame<A, B>;

// Values of one type that are known as a kernel is compiled: Constants<int, V::kBatch, V::kSize>.
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
