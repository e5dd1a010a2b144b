#include "span.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#include "ints_avx512.h"

#include "body.h"

const Body* const amx_body = &BODY;
#else
const Body* const amx_body = nullptr;
#endif
