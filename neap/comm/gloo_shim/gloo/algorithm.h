// torch-free
// What ProcessGroupGloo.hpp expects to come with it.
#pragma once

#include <memory>
#include <string>
#include <vector>
