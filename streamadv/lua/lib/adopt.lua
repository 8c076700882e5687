-- adopt(keys, spec, holder): a withdrawn group is begun again before the grouper has removed it.
--   keys  group, open, ledger, trainer
local function adopt(keys, spec, holder)
  local trainer = redis.call('HMGET', keys.trainer, 'epoch', 'version')
  redis.call('HSET', keys.group, 'holders', holder, 'epoch', trainer[1] or '0', 'version', trainer[2] or '0')
  redis.call('ZADD', keys.open, string.format('%.17g', now_ms() + spec.deadline_ms), spec.id)
  play(keys, spec.producer)
end
