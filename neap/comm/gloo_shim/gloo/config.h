// torch-free
#pragma once
