/* Included before each source: AVX512, and VNNI if EMULATE_VNNI is defined, in the form that SIMDe gives them on AVX2. */
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512VL__ 1
#ifdef EMULATE_VNNI
#define __AVX512VNNI__ 1
#endif

/* SIMDe 0.7.4 has no right name for these. */
typedef signed char emulated_bytes __attribute__((vector_size(16)));
typedef int emulated_ints __attribute__((vector_size(64)));

static inline float emulated_largest(__m512 x) {
    float most = x[0];
    for (int i = 1; i < 16; i++) most = x[i] > most ? x[i] : most;
    return most;
}
static inline int emulated_largest_int(__m512i x) {
    emulated_ints lanes = (emulated_ints)x;
    int most = lanes[0];
    for (int i = 1; i < 16; i++) most = lanes[i] > most ? lanes[i] : most;
    return most;
}
static inline int emulated_sum(__m512i x) {
    emulated_ints lanes = (emulated_ints)x;
    int sum = 0;
    for (int i = 0; i < 16; i++) sum += lanes[i];
    return sum;
}
static inline __m512 emulated_halves(__m256i x) {
    __m512 y;
    __m256 *parts = (__m256 *)&y;
    parts[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(x));
    parts[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1));
    return y;
}
#undef _mm512_cvtph_ps
#define _mm512_cvtph_ps emulated_halves
#undef _mm512_reduce_max_epi32
#define _mm512_reduce_max_epi32 emulated_largest_int
#undef _mm512_reduce_add_epi32
#define _mm512_reduce_add_epi32 emulated_sum
#undef _mm512_reduce_max_ps
#define _mm512_reduce_max_ps emulated_largest
#undef _mm512_madd_epi16
#define _mm512_madd_epi16 simde_mm512_madd_epi16
#undef _mm512_cvtepi8_epi32
#define _mm512_cvtepi8_epi32(x) ((__m512i)__builtin_convertvector((emulated_bytes)(x), emulated_ints))
#undef _mm512_cvtepi32_epi8
#define _mm512_cvtepi32_epi8(x) ((__m128i)__builtin_convertvector((emulated_ints)(x), emulated_bytes))
