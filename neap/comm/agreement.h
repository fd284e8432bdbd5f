// Ranks that tell each other words, and fail together: what files say and users got wrong is everybody's business. A
// null World is one rank alone. Collective; one thread.
#pragma once

#include <c10/util/FunctionRef.h>

#include <string>
#include <vector>

namespace neap::comm {

class World;

int rank_of(const World* world);
int size_of(const World* world);

// Every rank's text, by rank.
std::vector<std::string> exchange_texts(World* world, const std::string& mine, const char* unit);

// Runs `body` on each rank. When it ends in a UserError on some, all of them end in one: their own, or what the first
// of the others says.
void together(World* world, const char* unit, c10::function_ref<void()> body);
// The same for errors that every rank knows by now; an empty text is none.
void raise_first(const std::vector<std::string>& errors, int rank);

}  // namespace neap::comm
