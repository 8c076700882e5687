-- The hash `owners` of a shard: entry of the groups log -> '<batch id> <trajectories>' of the batch the group is in. A
-- group with an owner is in flight, every other group of the log is grouped.

-- The group leaves the log. Returns the counter of the ledger that has its trajectories.
local function disown(owners, entry)
  return redis.call('HDEL', owners, entry) == 1 and 'in_flight' or 'grouped'
end
