-- Admission: whether a group may be opened now, and opening it.
-- KEYS  open, groups, ledger, trainer, sizes

-- What the admissions of a call are judged by. limits: max_trajectory_bytes, max_bytes of this shard (-1 = open nothing),
-- shards, groups that count in the other shards ('-' = not known), max_staleness and batch_groups until a trainer says its
-- own ('-' = no pacing), '1' if the group may be new: one that was admitted before is opened again also after the trainer
-- has ended the run.
local function read_admission(limits)
  local max_trajectory_bytes, max_bytes, shards, elsewhere, max_staleness, batch_groups, is_new =
    string.match(limits, '^(%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+)$')
  local trainer = redis.call('HMGET', keys.trainer, 'max_staleness', 'batch_groups', 'held', 'epoch', 'version',
    'announced', 'finished', 'weights', 'clock', 'keep')
  local ledger = redis.call('HMGET', keys.ledger, 'shards', 'live_bytes', 'groups_eval', 'groups_abandoned',
    'kept_bytes')
  local sizes = read_sizes(keys.sizes)
  return {max_bytes = tonumber(max_bytes), shards = tonumber(shards), elsewhere = tonumber(elsewhere),
    is_new = is_new == '1', max_staleness = tonumber(trainer[1] or max_staleness),
    batch_groups = tonumber(trainer[2] or batch_groups), ahead = groups_ahead(trainer[3], ledger[3], ledger[4]),
    epoch = trainer[4] or '0', version = trainer[5] or '0', announced = trainer[6] or '', finished = trainer[7] == '1',
    weights = trainer[8] or '', clock = trainer[9], sizes = sizes,
    slot_bytes = slot_bytes(sizes, tonumber(max_trajectory_bytes)), known_shards = tonumber(ledger[1] or ''),
    live_bytes = tonumber(ledger[2] or '') or 0, kept_bytes = tonumber(ledger[5] or '') or 0,
    kept_limit = tonumber(string.match(trainer[10] or '', '^(%d+) .* archive$'))}
end

-- Returns a refusal if the producers are too far ahead of the trainer, else nil. Evaluation is never trained on: it is
-- not paced. Nor is what comes back after the trainer has ended the run: no batch would ever make room for it.
local function too_far_ahead(spec)
  if spec.role == 'eval' or admission.finished then return nil end
  if not (admission.max_staleness and admission.batch_groups) then return nil end
  local limit = (admission.max_staleness + 1) * admission.batch_groups
  local used = admission.ahead + (admission.elsewhere or 0)
  -- A shard admits its own share by itself. A client that wants more says how many groups the other shards have, because
  -- neither ids nor groups need spread evenly.
  if admission.shards > 1 and not admission.elsewhere then limit = math.floor(limit / admission.shards) end
  return used >= limit and {'busy', 'max_staleness', used, limit} or nil
end

-- Returns a refusal if groups that the archive has not got yet fill their budget, else nil.
local function archive_is_behind()
  local used, limit = admission.kept_bytes, admission.kept_limit
  if not limit or used <= limit then return nil end
  return {'busy', 'archive', string.format('%.17g', used), string.format('%.17g', limit)}
end

-- Returns a refusal if the slots of the group do not fit into the budget, else nil.
local function no_room(spec)
  local bytes = admission.slot_bytes
  local needed, limit = spec.slots * bytes + (spec.columns_bytes or 0), string.format('%.17g', admission.max_bytes)
  local used = admission.live_bytes + (counts.live_bytes or 0) + reserved_bytes(admission.sizes, bytes)
  if used + needed <= admission.max_bytes then return nil end
  if admission.max_bytes >= 0 and needed > admission.max_bytes then
    return {'busy', 'group_bytes', string.format('%.17g', bytes), limit}
  end
  local moving = 0
  for _, number in ipairs(redis.call('HMGET', keys.ledger, 'rollouts', 'scoring', 'in_flight')) do
    moving = moving + (tonumber(number or '') or 0)
  end
  return {'busy', 'max_bytes', string.format('%.17g', used), limit, redis.call('ZCARD', keys.open),
    redis.call('XLEN', keys.groups), moving, admission.batch_groups or '', string.format('%.17g', bytes)}
end

-- Admit and open a group that does not exist. Returns the group, or nil and
--   {'over'}    the trainer has ended the run
--   {'busy', 'max_staleness', groups ahead, limit}
--   {'busy', 'archive', bytes kept, how many may be kept}   the archive lags
--   {'busy', 'group_bytes', bytes a slot needs, max_bytes}   more than the whole budget
--   {'busy', 'max_bytes', bytes used, max_bytes, open groups, groups logged, trajectories in streams and in flight,
--    batch_groups or '', bytes a slot needs}
--               each with the last entry of the stream `admission` behind it ('' = none), see lib/announce
--   {'layout'}  nobody has confirmed that the run has so many shards: the server may have lost its manifest, and nobody
--               may read what is pushed here. Read the manifest again
-- What is reserved is a function of the open groups' free slots, so no credit can leak.
local function admit(hash, spec, producer)
  if admission.known_shards ~= admission.shards then return nil, {'layout'} end
  if admission.finished and admission.is_new and spec.role ~= 'eval' then return nil, {'over'} end
  local refused = too_far_ahead(spec) or archive_is_behind() or no_room(spec)
  if refused then
    refused[#refused + 1] = admission.announced
    return nil, refused
  end
  local now = now_ms()
  local group = {id = spec.id, hash = hash, state = 'open', role = spec.role, size = spec.size,
    slot_bytes = string.format('%d', admission.slot_bytes), opened_ms = string.format('%d', now), epoch = admission.epoch,
    version = admission.version, data_source = spec.data_source, slots = string.rep('.', spec.slots), producer = producer}
  group.changes = {'head', head_of(group), 'slots', group.slots, 'producer', producer}
  -- The first write: above maxmemory it is refused.
  redis.call('ZADD', keys.open, string.format('%d', shard_ms(admission.clock, now) + spec.deadline_ms), spec.id)
  forget_half(keys.sizes, admission.sizes)
  reserve(group.slot_bytes, spec.slots)
  if spec.columns_bytes then
    group.columns_bytes, group.columns_key = spec.columns_bytes, ''
    change(group, 'columns', spec.columns_bytes)
    reserve(spec.columns_bytes, 1)
  end
  count('groups_open', 1)
  if spec.role == 'eval' then
    if spec.round ~= '' then change(group, 'round', spec.round) end
    count('groups_eval', 1)
  else
    admission.ahead = admission.ahead + 1
  end
  return group
end
