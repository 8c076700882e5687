-- open_group(keys, spec): admit and open a group, or say why not.
--   keys  group, open, groups, ledger, trainer
--   spec  id, size, places, data_source, deadline_ms, max_trajectory_bytes, max_bytes, shards
-- Returns nil when opened, else {'busy', reason, used, limit}, or {'layout'} where nobody has confirmed that the run has so
-- many shards: the server may have lost its manifest, and nobody may read what is pushed here.
-- The reservation is a field of the open group and ends with it, so no credit can leak.
local function open_group(keys, spec)
  if tonumber(redis.call('HMGET', keys.ledger, 'shards')[1] or '') ~= spec.shards then return {'layout'} end
  local trainer = redis.call('HMGET', keys.trainer, 'max_staleness', 'batch_groups', 'held', 'epoch', 'version')
  local max_staleness, batch_groups = tonumber(trainer[1] or ''), tonumber(trainer[2] or '')
  if max_staleness and batch_groups then
    local limit = math.ceil((max_staleness + 1) * batch_groups / spec.shards)
    local used = redis.call('ZCARD', keys.open) + redis.call('XLEN', keys.groups) - (tonumber(trainer[3] or '') or 0)
    if used >= limit then return {'busy', 'max_staleness', used, limit} end
  end
  local bytes = redis.call('HMGET', keys.ledger, 'live_bytes', 'reserved_bytes')
  local used = (tonumber(bytes[1] or '') or 0) + (tonumber(bytes[2] or '') or 0)
  local reserve = spec.places * spec.max_trajectory_bytes
  if used + reserve > spec.max_bytes then
    return {'busy', 'max_bytes', string.format('%.17g', used), string.format('%.17g', spec.max_bytes)}
  end
  local now = now_ms()
  redis.call('HSET', keys.group, 'size', spec.size, 'places', spec.places, 'data_source', spec.data_source,
    'opened_ms', string.format('%.17g', now), 'reserved', string.format('%.17g', reserve),
    'epoch', trainer[4] or '0', 'version', trainer[5] or '')
  redis.call('ZADD', keys.open, string.format('%.17g', now + spec.deadline_ms), spec.id)
  redis.call('HINCRBY', keys.ledger, 'reserved_bytes', string.format('%d', reserve))
  redis.call('HINCRBY', keys.ledger, 'groups_open', 1)
  return nil
end
