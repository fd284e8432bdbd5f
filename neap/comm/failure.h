// torch-free
// What ends a run of several ranks. The text names the rank, the collective and the unit.
//
// The first failure that any rank notices is told to all: every rank of the world throws an error with the same cause,
// from the collective it is in or from the next one. After that the world does no more collectives; the process ends or
// makes a new World.
#pragma once

#include "neap/base/error.h"

namespace neap::comm {

// A rank died, left, or did not come within the timeout.
class RankFailure : public Error {
 public:
  using Error::Error;
};

// The ranks called different collectives, or the same one with other sizes, dtypes or units: the program took different
// branches on different ranks.
class Mismatch : public UserError {
 public:
  using UserError::UserError;
};

}  // namespace neap::comm
