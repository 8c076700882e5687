-- Admission: whether a group may be opened now, and opening it.
-- KEYS  group, open, groups, ledger, trainer, sizes
local ADMISSION_ARGS = 12

-- The first arguments of a script that may open a group:
--   group id, size, slots, data source, deadline (ms), max_trajectory_bytes, max_bytes of this shard (-1 = open nothing),
--   shards, groups that count in the other shards ('' = not known), max_staleness and batch_groups until a trainer says
--   its own ('' = no pacing), producer
local function admission_of(args)
  return {id = args[1], size = args[2], slots = tonumber(args[3]), data_source = args[4],
    deadline_ms = tonumber(args[5]), max_trajectory_bytes = tonumber(args[6]), max_bytes = tonumber(args[7]),
    shards = tonumber(args[8]), elsewhere = tonumber(args[9]), max_staleness = args[10], batch_groups = args[11],
    producer = args[12]}
end

-- Returns a refusal if the producers are too far ahead of the trainer, else nil.
local function too_far_ahead(spec, max_staleness, batch_groups, held)
  if not (max_staleness and batch_groups) then return nil end
  local limit = (max_staleness + 1) * batch_groups
  local used = groups_ahead(held) + (spec.elsewhere or 0)
  -- A shard admits its own share by itself. A client that wants more says how many groups the other shards have, because
  -- neither ids nor groups need spread evenly.
  if spec.shards > 1 and not spec.elsewhere then limit = math.floor(limit / spec.shards) end
  return used >= limit and {'busy', 'max_staleness', used, limit} or nil
end

-- Returns a refusal if the slots of the group, at so many bytes each, do not fit into the budget, else nil.
local function no_room(spec, sizes, bytes, batch_groups)
  local needed, limit = spec.slots * bytes, string.format('%.17g', spec.max_bytes)
  local used = count_of(keys.ledger, 'live_bytes') + reserved_bytes(sizes, bytes)
  if used + needed <= spec.max_bytes then return nil end
  if spec.max_bytes >= 0 and needed > spec.max_bytes then
    return {'busy', 'group_bytes', string.format('%.17g', bytes), limit}
  end
  local moving = count_of(keys.ledger, 'rollouts') + count_of(keys.ledger, 'scoring') + count_of(keys.ledger, 'in_flight')
  return {'busy', 'max_bytes', string.format('%.17g', used), limit, redis.call('ZCARD', keys.open),
    redis.call('XLEN', keys.groups), moving, batch_groups or ''}
end

-- Admit and open a group. Returns nil when opened, else
--   {'busy', 'max_staleness', groups ahead, limit}
--   {'busy', 'group_bytes', bytes a slot needs, max_bytes}   more than the whole budget
--   {'busy', 'max_bytes', bytes used, max_bytes, open groups, groups logged, trajectories in streams and in flight,
--    batch_groups or ''}
--   {'layout'}  nobody has confirmed that the run has so many shards: the server may have lost its manifest, and nobody
--               may read what is pushed here
-- What is reserved is a function of the open groups' unfilled slots, so no credit can leak.
local function open_group(spec)
  if tonumber(redis.call('HMGET', keys.ledger, 'shards')[1] or '') ~= spec.shards then return {'layout'} end
  local trainer = redis.call('HMGET', keys.trainer, 'max_staleness', 'batch_groups', 'held', 'epoch', 'version')
  local max_staleness, batch_groups = tonumber(trainer[1] or spec.max_staleness), tonumber(trainer[2] or spec.batch_groups)
  local sizes = read_sizes(keys.sizes)
  local bytes = slot_bytes(sizes, spec.max_trajectory_bytes)
  local refused = too_far_ahead(spec, max_staleness, batch_groups, trainer[3])
    or no_room(spec, sizes, bytes, batch_groups)
  if refused then return refused end
  local now = now_ms()
  redis.call('HSET', keys.group, 'size', spec.size, 'slots', spec.slots, 'data_source', spec.data_source,
    'opened_ms', string.format('%.17g', now), 'unfilled', spec.slots, 'slot_bytes', string.format('%d', bytes),
    'producer', spec.producer, 'epoch', trainer[4] or '0', 'version', trainer[5] or '0')
  redis.call('ZADD', keys.open, string.format('%.17g', now + spec.deadline_ms), spec.id)
  reserve(keys.sizes, string.format('%d', bytes), spec.slots)
  redis.pcall('HINCRBY', keys.ledger, 'groups_open', 1)
  return nil
end
