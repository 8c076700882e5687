-- count(name, n): add to a counter of the ledger. A script adds up what it counts, and writes it once at its end.
-- KEYS  ledger
local counts = {}

local function count(name, n) counts[name] = (counts[name] or 0) + n end

local function write_counts()
  for name, n in pairs(counts) do
    if n ~= 0 then redis.pcall('HINCRBY', keys.ledger, name, string.format('%d', n)) end
  end
end
