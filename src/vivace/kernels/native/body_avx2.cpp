#include "ints_avx2.h"

#include "body.h"

const Body avx2_body = BODY;
