-- Admission: whether a group may be opened now, and opening it.
local ADMISSION_ARGS = 12

-- The first arguments of a script that may open a group:
--   group id, size, slots, data source, deadline (ms), max_trajectory_bytes, max_bytes of this shard, shards, groups that
--   count in the other shards ('' = not known), max_staleness and batch_groups until a trainer says its own ('' = no
--   pacing), producer
local function admission_of(args)
  return {id = args[1], size = args[2], slots = tonumber(args[3]), data_source = args[4],
    deadline_ms = tonumber(args[5]), max_trajectory_bytes = tonumber(args[6]), max_bytes = tonumber(args[7]),
    shards = tonumber(args[8]), elsewhere = tonumber(args[9]), max_staleness = args[10], batch_groups = args[11],
    producer = args[12]}
end

-- Groups of this shard begun and neither terminal nor trained on. Those of lost producers wait for others to push, if
-- anybody does: they count again with the next record.
local function groups_ahead(keys, held)
  local abandoned = tonumber(redis.call('HMGET', keys.ledger, 'groups_abandoned')[1] or '') or 0
  return math.max(0, redis.call('ZCARD', keys.open) - math.max(0, abandoned)) + redis.call('XLEN', keys.groups)
    - (tonumber(held or '') or 0)
end

-- open_group(keys, spec): admit and open a group, or say why not.
--   keys  group, open, groups, ledger, trainer, sizes
-- Returns nil when opened, else {'busy', reason, used, limit}, for max_bytes with {open groups, groups logged, trajectories in
-- streams and in flight, batch_groups or ''}, or {'layout'} where nobody has confirmed that the run has so
-- many shards: the server may have lost its manifest, and nobody may read what is pushed here.
-- What is reserved is a function of the open groups' unfilled slots, so no credit can leak.
local function open_group(keys, spec)
  if tonumber(redis.call('HMGET', keys.ledger, 'shards')[1] or '') ~= spec.shards then return {'layout'} end
  local trainer = redis.call('HMGET', keys.trainer, 'max_staleness', 'batch_groups', 'held', 'epoch', 'version')
  local max_staleness, batch_groups = tonumber(trainer[1] or spec.max_staleness), tonumber(trainer[2] or spec.batch_groups)
  if max_staleness and batch_groups then
    local total = (max_staleness + 1) * batch_groups
    local limit, used = total, groups_ahead(keys, trainer[3]) + (spec.elsewhere or 0)
    -- Its share a shard admits by itself. Who wants more says what the others have: ids need not spread evenly, nor groups.
    if spec.shards > 1 and not spec.elsewhere then limit = math.floor(total / spec.shards) end
    if used >= limit then return {'busy', 'max_staleness', used, limit} end
  end
  local known = read_sizes(keys.sizes)
  local each = slot_bytes(known, spec.max_trajectory_bytes)
  local used = (tonumber(redis.call('HMGET', keys.ledger, 'live_bytes')[1] or '') or 0) + reserved_bytes(known, each)
  if used + spec.slots * each > spec.max_bytes then
    local reason = spec.max_bytes >= 0 and spec.slots * each > spec.max_bytes and 'group_bytes' or 'max_bytes'
    if reason == 'group_bytes' then used = each end
    local on_way = redis.call('HMGET', keys.ledger, 'rollouts', 'scoring', 'in_flight')
    local moving = (tonumber(on_way[1] or '') or 0) + (tonumber(on_way[2] or '') or 0) + (tonumber(on_way[3] or '') or 0)
    return {'busy', reason, string.format('%.17g', used), string.format('%.17g', spec.max_bytes),
      redis.call('ZCARD', keys.open), redis.call('XLEN', keys.groups), moving, batch_groups or ''}
  end
  local now = now_ms()
  redis.call('HSET', keys.group, 'size', spec.size, 'slots', spec.slots, 'data_source', spec.data_source,
    'opened_ms', string.format('%.17g', now), 'unfilled', spec.slots, 'slot_bytes', string.format('%d', each),
    'producer', spec.producer, 'epoch', trainer[4] or '0', 'version', trainer[5] or '0')
  redis.call('ZADD', keys.open, string.format('%.17g', now + spec.deadline_ms), spec.id)
  reserve(keys.sizes, string.format('%d', each), spec.slots)
  redis.pcall('HINCRBY', keys.ledger, 'groups_open', 1)
  return nil
end
