-- Pacing: how many groups of a shard count against max_staleness.
-- KEYS  open, groups, ledger
-- Groups begun and neither terminal nor trained on; `held` are trained and not committed. Evaluation groups do not count,
-- and those of lost producers do not until somebody pushes to them or touches them: `eval` and `abandoned` of the ledger.
local function groups_ahead(held, eval, abandoned)
  local uncounted = math.max(0, tonumber(eval or '') or 0) + math.max(0, tonumber(abandoned or '') or 0)
  return math.max(0, redis.call('ZCARD', keys.open) - uncounted) + redis.call('XLEN', keys.groups) - (tonumber(held or '') or 0)
end
